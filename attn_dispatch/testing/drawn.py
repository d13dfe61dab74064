"""Random problems, within what patterns and arguments may be."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

import torch

from attn_dispatch.spec.data import BlocksForm, Form, RangesForm
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import normal_device
from attn_dispatch.testing.cases import DTYPES, Case

LONGEST = 70  #: tokens
OFFSETS: tuple[Literal["mod", "block"], ...] = ("mod", "block")
HEADS: tuple[Literal["all", "split"], ...] = ("all", "split")
STRIDES = ("bnhd", "bhnd", "nbhd", "bnhd+gaps", "bndh")


def random_problems(
    seed: int, count: int = 20, *, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Problem]:
    """Draw small problems of every pattern, with masks, grouped heads, unequal lengths, views, scales and directions.

    The same arguments give the same problems.

    Args:
        device: on which the tensors lie.
        dtypes: to draw from.
    """
    rng = Random(seed)
    return [random_problem(rng, device=device, dtypes=dtypes) for _ in range(count)]


def random_problem(
    rng: Random, *, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES
) -> Problem:
    """One of `random_problems`; half of them have one length of queries and keys, and all return lse."""
    q_len = rng.randint(1, LONGEST)
    k_len = rng.choice([q_len, rng.randint(1, LONGEST)])
    kv_heads, head_dim = rng.randint(1, 4), rng.randint(1, 20)
    heads = kv_heads * rng.randint(1, 4)
    pattern = random_pattern(rng, q_len, k_len)
    if rng.random() < 0.3:
        pattern = random_form(rng, q_len, k_len)
    scale = rng.choice([float(head_dim) ** -0.5, round(rng.uniform(-2, 2), 3)])
    shape, dtype, needs_grad = (rng.randint(1, 3), q_len, heads, head_dim), rng.choice(dtypes), rng.random() < 0.5
    masks = {"seq_lens": q_len == k_len and rng.choice([False, True]), "key_mask": rng.choice([False, True])}
    strides = rng.choice(STRIDES), rng.choice(STRIDES), rng.choice(STRIDES)
    case = Case("drawn", pattern, shape, k_len, kv_heads, strides=strides, scale=scale, **masks)
    return case.problem(dtype, needs_grad=needs_grad, device=normal_device(device))


def random_form(rng: Random, q_len: int, k_len: int) -> Form:
    """That of a pattern that holds tensors."""
    classes, by_row = rng.choice([(None, None), (-rng.randint(0, 9), rng.randint(0, 2))]), rng.choice([False, True])
    if rng.random() < 0.4:
        return RangesForm(rng.randint(1, 3), by_row, *classes)
    size, within = (random_block(rng), random_block(rng)), rng.choice([Dense(), random_pattern(rng, q_len, k_len)])
    scope = rng.choice(("all", "kv_heads", "heads"))
    return BlocksForm(size, scope, by_row, rng.choice([False, True]), within, *classes)


def random_block(rng: Random) -> int:
    """Queries or keys of a block."""
    return rng.choice([16, 32, 64, 128, 256, rng.randint(1, 40)])


def random_pattern(rng: Random, q_len: int, k_len: int) -> Pattern:
    """A pattern that can have these lengths in tokens."""
    kinds = [_dense, _window, *([_dilated, _dilated, _neighborhood] if q_len <= k_len else [])]
    return rng.choice(kinds)(rng, k_len)


def _dense(rng: Random, k_len: int) -> Pattern:
    return Dense(rng.choice([False, True]))


def _window(rng: Random, k_len: int) -> Pattern:
    left, right = (rng.choice([None, rng.randint(0, 20)]) for _ in range(2))
    return Window(left, right, rng.choice([0, rng.randint(0, 20)]))


def _dilated(rng: Random, k_len: int) -> Pattern:
    branches = [(rng.randint(1, 80), rng.randint(1, 6)) for _ in range(rng.randint(1, 4))]
    lengths, rates = zip(*branches)
    return Dilated(lengths, rates, rng.choice([False, True]), rng.choice(OFFSETS), rng.choice(HEADS))


def _neighborhood(rng: Random, k_len: int) -> Pattern:
    """On a grid of two axes; a window of `edges="shift"` and its dilation fit the axis."""
    rows = rng.choice([n for n in range(1, k_len + 1) if k_len % n == 0])
    grid, shift = (rows, k_len // rows), rng.choice([False, True])
    dilation = tuple(rng.randint(1, min(3, size) if shift else 3) for size in grid)
    widest = [min(5, size // step) for size, step in zip(grid, dilation)]
    window = tuple(rng.randint(1, most) if shift else rng.choice([1, 3, 5]) for most in widest)
    causal = tuple(rng.choice([False, True]) for _ in grid)
    stride = tuple(rng.randint(1, w) if shift else 1 for w in window)
    return Neighborhood(grid, window, dilation, causal, "shift" if shift else "clip", stride)
