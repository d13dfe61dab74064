"""What a pattern is, in plain Python integers, one query and key at a time; and patterns to draw from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.testing.drawn import LONGEST, random_pattern

KINDS: dict[str, Callable[..., Pattern]] = {
    "Dense": Dense,
    "Window": Window,
    "Dilated": Dilated,
    "Neighborhood": Neighborhood,
}


def texts(longest: int) -> st.SearchStrategy[str]:
    """Of any characters: without a codec, whose tables take seconds to make."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=longest)


@dataclass(frozen=True)
class Spec:
    """A pattern's arguments as they were given, and the lengths to evaluate it at."""

    kind: str
    arguments: dict[str, Any]
    q_len: int
    k_len: int
    heads: int

    @property
    def pattern(self) -> Pattern:
        return KINDS[self.kind](**self.arguments)

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.q_len, self.k_len, self.heads

    def multiplicity(self) -> list[list[list[int]]]:
        """[heads][queries][keys] by the definition."""
        sees = NAIVE[self.kind]
        return [
            [[sees(self, h, i, j) for j in range(self.k_len)] for i in range(self.q_len)] for h in range(self.heads)
        ]


# --- the definition, naively ------------------------------------------------------------------------------------------


def naive_dense(spec: Spec, h: int, i: int, j: int) -> int:
    if not spec.arguments["is_causal"]:
        return 1
    return 1 if j <= i + (spec.k_len - spec.q_len) else 0


def naive_window(spec: Spec, h: int, i: int, j: int) -> int:
    distance = j - (i + spec.k_len - spec.q_len)
    left, right = spec.arguments["left"], spec.arguments["right"]
    too_far_left = left is not None and distance < -left and j >= spec.arguments["sinks"]
    too_far_right = right is not None and distance > right
    return 0 if too_far_left or too_far_right else 1


def naive_offset(arguments: dict[str, Any], b: int, h: int, heads: int) -> int | None:
    """The offset of head h in branch b; None where it stays out of that branch."""
    rate: int = arguments["dilation_rates"][b]
    if arguments["heads"] == "split":
        groups = len(arguments["segment_lengths"])
        owners: list[int] = []
        for group in range(groups):
            owners += [group] * (heads // groups + (1 if group < heads % groups else 0))
        return b % rate if owners[h] == b else None
    if arguments["offsets"] == "mod":
        return h % rate
    run = heads // rate
    while run * rate < heads:
        run += 1
    return h // run


def naive_dilated(spec: Spec, h: int, i: int, j: int) -> int:
    count, i = 0, i + spec.k_len - spec.q_len
    first, total = spec.arguments.get("first_head", 0), spec.arguments.get("all_heads") or spec.heads
    for b in range(len(spec.arguments["segment_lengths"])):
        w = min(spec.arguments["segment_lengths"][b], spec.k_len)
        r = spec.arguments["dilation_rates"][b]
        offset = naive_offset(spec.arguments, b, first + h, total)
        selected = offset is not None and (i % w) % r == offset and (j % w) % r == offset
        in_time = j <= i or not spec.arguments["is_causal"]
        if selected and i // w == j // w and in_time:
            count += 1
    return count


def per_axis(value: Any, axes: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * axes


def coordinates(position: int, grid: list[int]) -> list[int]:
    """Row-major: the last axis runs fastest."""
    found = []
    for size in reversed(grid):
        found.append(position % size)
        position //= size
    return found[::-1]


def naive_axis(x: int, y: int, size: int, w: int, e: int, causal: bool, edges: str, s: int) -> bool:
    if edges == "shift":
        return y in slid(size, w, e, s, causal)[x]
    return x % e == y % e and abs(x - y) <= (w - 1) // 2 * e and (y <= x or not causal)


@cache
def slid(size: int, window: int, dilation: int, stride: int, causal: bool) -> list[list[int]]:
    """NATTEN's rule: the coordinates that each coordinate of an axis sees, by a window that slides until it lies
    inside.
    """
    found: list[list[int]] = [[] for _ in range(size)]
    for residue in range(dilation):
        line = list(range(residue, size, dilation))
        for begin in range(0, len(line), stride):
            group = range(len(line))[begin : begin + stride]
            if causal:
                # The window ends at the last query of the group, and each query sees no later key.
                shared = range(group[-1] - window + 1, group[-1] + 1)
                for place in group:
                    found[line[place]] = [line[key] for key in shared if 0 <= key <= place]
                continue
            # One more key before the middle query than after it where the window is even. A group that the end of the
            # line cuts short takes its last query where it has no middle one.
            middle = begin + stride // 2
            while middle not in group:
                middle -= 1
            first = last = middle
            for turn in range(window - 1):
                first, last = (first - 1, last) if turn % 2 == 0 else (first, last + 1)
            while first < 0:
                first, last = first + 1, last + 1
            while last >= len(line):
                first, last = first - 1, last - 1
            for place in group:
                found[line[place]] = line[first : last + 1]
    return found


def naive_neighborhood(spec: Spec, h: int, i: int, j: int) -> int:
    grid = list(spec.arguments["grid"])
    x, y, edges = coordinates(i + spec.k_len - spec.q_len, grid), coordinates(j, grid), spec.arguments["edges"]
    window, dilation, causal, stride = (
        per_axis(spec.arguments[name], len(grid)) for name in ("window", "dilation", "is_causal", "stride")
    )
    axes = zip(x, y, grid, window, dilation, causal, [edges] * len(grid), stride, strict=True)
    return int(all(naive_axis(*axis) for axis in axes))


NAIVE: dict[str, Callable[[Spec, int, int, int], int]] = {
    "Dense": naive_dense,
    "Window": naive_window,
    "Dilated": naive_dilated,
    "Neighborhood": naive_neighborhood,
}


# --- what is drawn ----------------------------------------------------------------------------------------------------


@st.composite
def dense(draw: st.DrawFn) -> Spec:
    lengths = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    return Spec("Dense", {"is_causal": draw(st.booleans())}, *lengths, draw(st.integers(1, 2)))


@st.composite
def windows(draw: st.DrawFn) -> Spec:
    lengths = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    side = st.none() | st.integers(0, 14)
    arguments = {"left": draw(side), "right": draw(side), "sinks": draw(st.just(0) | st.integers(0, 14))}
    return Spec("Window", arguments, *lengths, draw(st.integers(1, 2)))


@st.composite
def dilated(draw: st.DrawFn) -> Spec:
    n, branches = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    arguments = {
        "segment_lengths": draw(st.lists(st.integers(1, 30), min_size=branches, max_size=branches)),
        "dilation_rates": draw(st.lists(st.integers(1, 5), min_size=branches, max_size=branches)),
        "is_causal": draw(st.booleans()),
        "offsets": draw(st.sampled_from(["mod", "block"])),
        "heads": draw(st.sampled_from(["all", "split"])),
    }
    heads, before, after = draw(st.integers(1, 5)), draw(st.just(0) | st.integers(0, 5)), draw(st.integers(0, 5))
    if before:
        arguments |= {"first_head": before, "all_heads": before + heads + after}
    return Spec("Dilated", arguments, draw(st.just(n) | st.integers(1, n)), n, heads)


@st.composite
def neighborhoods(draw: st.DrawFn) -> Spec:
    axes = draw(st.integers(1, 3))
    grid = draw(st.lists(st.integers(1, (24, 6, 4)[axes - 1]), min_size=axes, max_size=axes))
    edges = draw(st.sampled_from(["clip", "shift"]))
    dilation = [draw(st.integers(1, min(3, size) if edges == "shift" else 3)) for size in grid]
    widest = [size // e if edges == "shift" else 9 for size, e in zip(grid, dilation, strict=True)]
    window = [draw(st.integers(1, most) if edges == "shift" else st.sampled_from([1, 3, 5, 7, 9])) for most in widest]
    stride = [draw(st.just(1) | st.integers(1, w)) if edges == "shift" else 1 for w in window]
    causal = draw(st.lists(st.booleans(), min_size=axes, max_size=axes) | st.booleans())
    arguments = {
        "grid": grid,
        "window": window,
        "dilation": dilation,
        "is_causal": causal,
        "edges": edges,
        "stride": stride,
    }
    n = int(np.prod(grid))
    return Spec("Neighborhood", arguments, draw(st.just(n) | st.integers(1, n)), n, draw(st.integers(1, 2)))


SPECS = dense() | windows() | dilated() | neighborhoods()


@st.composite
def masks(draw: st.DrawFn, spec: Spec) -> tuple[list[int] | None, list[list[bool]] | None]:
    batch = draw(st.integers(1, 2))
    rows = st.lists(st.booleans(), min_size=spec.k_len, max_size=spec.k_len)
    lens = st.lists(st.integers(0, spec.q_len), min_size=batch, max_size=batch)
    seq_lens = draw(st.none() | lens) if spec.q_len == spec.k_len else None
    key_mask = draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    return seq_lens, key_mask


def lengths() -> st.SearchStrategy[int]:
    return st.integers(1, LONGEST)


def patterns(q_len: int, k_len: int) -> st.SearchStrategy[Pattern]:
    """As `random_problems` draws them; hypothesis finds the smallest that fails."""
    return st.randoms(use_true_random=False).map(lambda rng: random_pattern(rng, q_len, k_len))


@st.composite
def problems(draw: st.DrawFn, *left: type[Pattern]) -> Problem:
    """With gradients, grouped heads and any two lengths; of all kinds of patterns but those that are left out."""
    q_len = draw(lengths())
    k_len = draw(st.just(q_len) | lengths())
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pattern = draw(patterns(q_len, k_len).filter(lambda pattern: not isinstance(pattern, left)))
    case = Case("drawn", pattern, (1, q_len, kv_heads * group, 8), k_len=k_len, kv_heads=kv_heads)
    return case.problem(torch.float32, needs_grad=True)
