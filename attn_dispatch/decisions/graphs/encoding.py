"""A call as arguments of an operator: its pattern as a text and integers, which may be symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from attn_dispatch.spec.checks import integer, integers
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Call, choose_pattern

#: The fields of `Encoded` with their types in a graph, in the order that exported programs have them in.
SCHEMA = {
    "seq_lens": "Tensor?", "key_mask": "Tensor?", "documents": "Tensor?", "cu_seqlens": "Tensor?",
    "alibi_slopes": "Tensor?", "bias": "Tensor?", "pattern": "str", "numbers": "SymInt[]", "scale": "float?",
    "softcap": "float?", "backend": "str?", "order": "str?", "first_head": "SymInt?", "all_heads": "SymInt?",
    "bias_needs_grad": "bool",
}  # fmt: skip
SAME = [name for name in SCHEMA if name in Call._fields]  #: those that a call has, too; but `pattern` is a text
TENSORS = [name for name, kind in SCHEMA.items() if kind == "Tensor?"]  #: they come first


class Encoded(NamedTuple):
    """What the operators take of a call besides q, k and v: as `Call`, but for the pattern's text and numbers."""

    seq_lens: Tensor | None
    key_mask: Tensor | None
    documents: Tensor | None
    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    pattern: str
    numbers: list[int]
    scale: float | None
    softcap: float | None
    backend: str | None
    order: str | None
    first_head: int | None
    all_heads: int | None
    bias_needs_grad: bool

    @classmethod
    def first_of(cls, arguments: Sequence[Any]) -> Encoded:
        """These among an operator's arguments after q, k and v (and out and lse)."""
        return cls(*arguments[: len(SCHEMA)])

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[: len(TENSORS)]

    @property
    def settings(self) -> tuple[Any, ...]:
        return self[len(TENSORS) :]


def encoded(call: Call, bias_needs_grad: bool) -> Encoded:
    """What an operator takes of a call; `decoded` reads it. Raises InvalidInput."""
    given = {name: getattr(call, name) for name in SAME}
    given["pattern"], given["numbers"] = encoded_pattern(call)
    for name, least in (("first_head", 0), ("all_heads", 1)):
        given[name] = None if given[name] is None else integer(name, given[name], least)
    return Encoded(**given, bias_needs_grad=bias_needs_grad)


def decoded(qkv: Iterable[Tensor], given: Encoded, return_lse: bool) -> Call:
    """The call that an operator computes, with tokens first. Raises InvalidInput."""
    asked = {name: getattr(given, name) for name in SAME}
    asked["pattern"] = decoded_pattern(given.pattern, tuple(given.numbers))
    q, k, v = qkv
    return Call(q, k, v, **asked, return_lse=return_lse)


def encoded_pattern(call: Call) -> tuple[str, list[int]]:
    """A text and numbers for a call's pattern; `decoded_pattern` reads them.

    No constructor is called: its comparisons would make symbolic numbers part of the graph.
    """
    alone = call.segment_lengths is None and call.dilation_rates is None
    if call.pattern is not None:
        if not (isinstance(call.pattern, Pattern) and alone and call.is_causal is False):
            choose_pattern(call)  # raises
        return _encoded(call.pattern)
    if not isinstance(call.is_causal, bool) or (call.segment_lengths is None) != (call.dilation_rates is None):
        choose_pattern(call)  # raises
    if alone:
        return f"dense {call.is_causal}", []
    lengths, rates = (integers(name, getattr(call, name)) for name in ("segment_lengths", "dilation_rates"))
    return f"dilated {call.is_causal} mod all {len(lengths)} {len(rates)}", [*lengths, *rates, 0, -1]


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
def decoded_pattern(code: str, numbers: tuple[int, ...]) -> Pattern:
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
    return Reordered(decoded_pattern(" ".join(rest[1:]), numbers), rest[0])
