"""Patterns as a text and integers that may be symbolic: what a graph holds of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_dispatch.spec.checks import integers
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import choose_pattern
from attn_dispatch.spec.reordered import Reordered


def encoded_arguments(
    pattern: Pattern | None, segment_lengths: Any, dilation_rates: Any, is_causal: bool
) -> tuple[str, list[int]]:
    """A text and numbers for the pattern that `attend`'s arguments give; `decoded` reads them.

    No constructor is called: its comparisons would make symbolic numbers part of the graph.
    """
    if pattern is not None:
        alone = segment_lengths is None and dilation_rates is None and is_causal is False
        if not (isinstance(pattern, Pattern) and alone):
            choose_pattern(pattern, segment_lengths, dilation_rates, is_causal)  # raises
        return _encoded(pattern)
    if not isinstance(is_causal, bool) or (segment_lengths is None) != (dilation_rates is None):
        choose_pattern(pattern, segment_lengths, dilation_rates, is_causal)  # raises
    if segment_lengths is None:
        return f"dense {is_causal}", []
    lengths, rates = integers("segment_lengths", segment_lengths), integers("dilation_rates", dilation_rates)
    return f"dilated {is_causal} mod all {len(lengths)} {len(rates)}", [*lengths, *rates, 0, -1]


def _encoded(pattern: Pattern) -> tuple[str, list[int]]:
    if isinstance(pattern, Dense):
        return f"dense {pattern.is_causal}", []
    if isinstance(pattern, Window):
        sides = [-1 if side is None else side for side in (pattern.left, pattern.right)]
        return "window", [*sides, pattern.sinks]
    if isinstance(pattern, Dilated):
        lengths, rates = pattern.segment_lengths, pattern.dilation_rates
        code = f"dilated {pattern.is_causal} {pattern.offsets} {pattern.heads} {len(lengths)} {len(rates)}"
        return code, [*lengths, *rates, pattern.first_head, -1 if pattern.all_heads is None else pattern.all_heads]
    if isinstance(pattern, Neighborhood):
        causal = ",".join([str(flag) for flag in pattern.is_causal])
        code, numbers = f"neighborhood {pattern.edges} {causal}", [*pattern.grid, *pattern.window, *pattern.dilation]
        return code, [*numbers, *pattern.stride] if pattern.edges == "shift" else numbers
    assert isinstance(pattern, Reordered)
    code, numbers = _encoded(pattern.pattern)
    return f"reordered {pattern.order} {code}", numbers


@lru_cache(4096)
def decoded(code: str, numbers: tuple[int, ...]) -> Pattern:
    """The pattern of a text and its numbers. Raises InvalidInput."""
    kind, *rest = code.split()
    if kind == "dense":
        return Dense(rest[0] == "True")
    if kind == "window":
        left, right = (None if side == -1 else side for side in numbers[:2])
        return Window(left, right, numbers[2])
    if kind == "dilated":
        causal, offsets, heads, lengths, rates = rest
        end = int(lengths) + int(rates)
        first_head, all_heads = numbers[end:]
        return Dilated(
            numbers[: int(lengths)],
            numbers[int(lengths) : end],
            causal == "True",
            offsets,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            heads,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            first_head,
            None if all_heads == -1 else all_heads,
        )
    if kind == "neighborhood":
        edges, causal = rest
        flags = tuple(flag == "True" for flag in causal.split(","))
        axes = len(flags)
        grid, window, dilation, stride = (numbers[axes * n : axes * (n + 1)] for n in range(4))
        # Programs that were exported before there were strides hold none.
        return Neighborhood(grid, window, dilation, flags, edges, stride or (1,))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert kind == "reordered"
    return Reordered(decoded(" ".join(rest[1:]), numbers), rest[0])
