"""Hard cases: small problems of the caller's class that are known to break kernels, for the gate.

They share dtype, head_dim, kind of pattern, masks, direction and the rest with the caller's problem; lengths,
batch and heads are small. In every run, memory that a backend did not write or must not read is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.hidden import Hidden, keys_hidden_together, unseen_keys
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.private import DispatchMode
from attn_dispatch.spec.data import BlocksForm, Form, RangesForm
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES, randn, stride_class
from attn_dispatch.tuning.example import Example, pattern_data, score_tensors

LARGEST_SCORE = 1e4  #: absolute value of a scaled score
HUGE_SCORE = 1e9  #: absolute value of one of which float32 has no digits after the point
LARGEST_HALF_PRODUCT = 2.0**15  #: absolute value of q times k before scaling, in float16, whose maximum is 65504
OUTLIER = 2.0**10  #: factor on one entry of head_dim, as of models whose activations have outliers
GIVEN_SCALE = 0.75  #: factor on the default scale, in place of any scale given by the caller
DENSITY = -2  #: half octaves: half of the pairs of a pattern that holds tensors
LARGEST_BLOCK = 256  #: queries or keys of a block; larger ones are halved until they are no larger
MAX_GROUP = 3  #: query heads for each head of k and v
MAX_BRANCHES = 6  #: branches of a dilated pattern that heads are split between
EVEN, ODD, SHORT, MANY = 192, 77, 40, 130  #: tokens: one and a half tiles, multiples of none; keys for one query
GRIDS = {EVEN: ((192,), (16, 12), (8, 6, 4)), ODD: ((77,), (11, 7), (5, 5, 3))}  #: by tokens, then by axes - 1
VIEWS = ("bnhd+gaps", "bnhd+gaps", "bhnd+gaps", "bhnd")  #: memory orders of q, k, v and the gradient
SCATTERED = ("bndh", "nhd+expanded:b", "bdnh", "d+expanded:bnh")
ODD_K = (False, True, False, False)

NAN_MARGIN = 4096  #: NaN entries before and after a view; a multiple of the alignment of tensors
SPAN = 3  #: memory of a view, in dense tensors of its shape: a kernel that mistakes the strides reads NaN, not beyond
COPIES = 3  #: freed NaN blocks of each size
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_UNWRITTEN = {getattr(torch.ops.aten, name) for name in _EMPTY}


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """The recipe of a hard case; `kinds` are the memory orders of q, k, v and the gradient of out."""

    hazard: str
    problem: Problem
    kinds: tuple[str, ...]
    empty: bool = False  #: for each mask, one batch entry without keys
    large: bool = False  #: scores up to LARGEST_SCORE
    odd_masks: bool = False  #: int32 seq_lens, masks that are not contiguous
    odd: tuple[bool, ...] = (False,) * 4  #: q, k, v and the gradient lie one entry past an aligned address; masks as q
    all_sizes: bool = False  #: zeros, denormal numbers and outliers
    low: float = 0.0  #: by this, at most, a bias or slopes lower all scores of a row
    hidden: bool = False  #: NaN and infinity in keys that no query sees, and in padding queries


@lru_cache(64)
def class_key(problem: Problem) -> tuple[CaseSpec, ...]:
    """The recipes of the hard cases: problems with equal recipes share their cases."""
    if problem.ranks > 1:
        return ()
    own = (*map(_whole, problem.strides), "bnhd")
    placed = _places_queries(problem.pattern)
    unequal = not placed and not problem.has_seq_lens
    small, masks = partial(_small, problem), problem.has_seq_lens + problem.has_key_mask
    uneven, some = (ODD, SHORT if unequal else ODD), small(2, ODD)
    found = [
        CaseSpec("large scores", small(1, EVEN), own, large=True),
        CaseSpec("odd addresses", small(1 + masks, *uneven), own, empty=True, odd=(True,) * 4),
        CaseSpec("", small(max(2, 1 + masks), 1, MANY if unequal else 1), own, empty=True),
        CaseSpec("packed views", some, VIEWS, odd_masks=True),
        CaseSpec("scattered views of all sizes", some, SCATTERED, odd_masks=True, odd=ODD_K, all_sizes=True),
    ]
    # Tolerances grow with scores: these find NaN, and what is far too large. CUDA's libraries are not asked.
    if problem.device.type == "cpu":
        lows = [HUGE_SCORE, math.inf] if problem.bias else [HUGE_SCORE] if problem.alibi_axes else []
        found += [CaseSpec("hugely negative rows", small(1, *uneven), own, low=each) for each in lows]
    if problem.masked or problem.bias or isinstance(problem.pattern, Form) or unseen_keys(small(1, EVEN)) is not None:
        found.append(CaseSpec("NaN that is hidden", small(2, EVEN), own, hidden=True))
    if placed and problem.q_len < problem.k_len:
        ends = small(2, SHORT, ODD), small(1, 1, EVEN)
        found += [CaseSpec("at the end of longer keys", each, own, hidden=True) for each in ends]
    return tuple(found)


# --- small problems -------------------------------------------------------------------------------------------


def _small(problem: Problem, batch: int, q_len: int, k_len: int | None = None) -> Problem:
    k_len = k_len or q_len
    pattern = fitted(problem.pattern, k_len if _places_queries(problem.pattern) else q_len)
    if isinstance(pattern, RangesForm | BlocksForm):
        pattern = replace(pattern, by_row=pattern.by_row and batch > 1)
    if isinstance(pattern, BlocksForm):
        q_len, k_len = _several_blocks(pattern.size, q_len, k_len)
        k_len = max(q_len, k_len) if _places_queries(pattern) else k_len
    if (grid := getattr(_inner(pattern), "grid", None)) is not None:
        q_len, k_len = (math.prod(grid) if q_len == k_len else q_len), math.prod(grid)
    heads, kv_heads = _few_heads(problem)
    default = math.pow(problem.head_dim, -0.5)
    sizes: dict[str, Any] = {"batch": batch, "q_len": q_len, "k_len": k_len, "heads": heads, "kv_heads": kv_heads}
    scale = default if problem.default_scale else math.copysign(GIVEN_SCALE * default, problem.scale)
    bias = tuple(own if size > 1 else 1 for size, own in zip(problem.bias, (batch, heads)))
    pattern = pattern.simplify(q_len, k_len, heads)
    return replace(problem, pattern=pattern, **sizes, scale=scale, dropout_p=0.0, bias=bias)


def _inner(pattern: Pattern) -> Pattern:
    """The pattern in natural order; of blocks, the one they are within."""
    return getattr(pattern, "within", pattern.natural)


def _several_blocks(size: tuple[int, int], q_len: int, k_len: int) -> tuple[int, int]:
    """Lengths of two blocks or more, but for a single query; equal ones stay equal."""
    if q_len == k_len:
        size = max(size), max(size)
    q_len, k_len = (n if n == 1 or n > block else n + block for n, block in zip((q_len, k_len), size))
    return q_len, k_len


def _places_queries(pattern: Pattern) -> bool:
    """Whether queries lie at the end of longer keys, in the pattern's segments or grid."""
    return isinstance(_inner(pattern), Dilated | Neighborhood)


def _few_heads(problem: Problem) -> tuple[int, int]:
    """Small numbers of heads and of heads of k and v, grouped where the problem's are."""
    group = problem.heads // problem.kv_heads
    group = min(next((n for n in range(2, group + 1) if group % n == 0), 1), MAX_GROUP)
    least = 2
    pattern = _inner(problem.pattern)
    if isinstance(pattern, Dilated) and pattern.heads == "split":
        least = min(len(pattern.branches), MAX_BRANCHES)
    kv_heads = min(problem.kv_heads, max(2, -(-least // group)))
    return kv_heads * group, kv_heads


def fitted(pattern: Pattern, length: int) -> Pattern:
    """Scale a pattern to about this many tokens, keeping its kind."""
    if isinstance(pattern, Window):
        left, right = (None if side is None else min(side, length // 4) for side in (pattern.left, pattern.right))
        return Window(left, right, min(pattern.sinks, length // 4))
    if isinstance(pattern, Dilated):
        return replace(pattern, segment_lengths=_segments(pattern, length))
    if isinstance(pattern, Neighborhood):
        return _neighborhood(pattern, length)
    if isinstance(pattern, BlocksForm):
        rows, columns = (n >> ((n - 1) // LARGEST_BLOCK).bit_length() for n in pattern.size)
        pattern = replace(pattern, size=(rows, columns), within=fitted(pattern.within, length))
    if isinstance(pattern, RangesForm | BlocksForm):  # problems of all densities share the cases
        return replace(pattern, density=DENSITY, imbalance=None)
    return replace(pattern, pattern=fitted(pattern.pattern, length)) if isinstance(pattern, Reordered) else pattern


def _segments(pattern: Dilated, length: int) -> tuple[int, ...]:
    """Scale segment lengths so that the shortest is about a quarter of the sequence; multiples of a rate stay so."""
    shortest = min(pattern.segment_lengths)
    target = min(shortest, max(1, length // 4 - 1))
    scaled = []
    for segment, rate in pattern.branches:
        tokens = max(1, segment * target // shortest)
        scaled.append(tokens if segment % rate else max(1, tokens // rate) * rate)
    return tuple(scaled)


def _neighborhood(pattern: Neighborhood, length: int) -> Neighborhood:
    axes = len(pattern.grid)
    grid = (1,) * axes if length == 1 else GRIDS[length][axes - 1]
    dilation = tuple(min(step, 2 if size > 3 else 1) for step, size in zip(pattern.dilation, grid))
    window = tuple(min(w, max(1, n // e - (w - n // e) % 2)) for w, n, e in zip(pattern.window, grid, dilation))
    return replace(pattern, grid=grid, window=window, dilation=dilation, stride=tuple(map(min, pattern.stride, window)))


def _whole(kind: str) -> str:
    """Restore the axes of size 1 that a stride class omits."""
    name, *flags = kind.split("+")
    for order in ("bnhd", "bhnd"):
        if name == "".join(axis for axis in order if axis in name):
            return "+".join([order, *flags])
    return kind


# --- tensors --------------------------------------------------------------------------------------------------


def example_of(spec: CaseSpec) -> Example:
    """The tensors of a recipe."""
    generator = torch.Generator().manual_seed(0)
    q_shape = (spec.problem.batch, spec.problem.q_len, spec.problem.heads, spec.problem.head_dim)
    kv_shape = (spec.problem.batch, spec.problem.k_len, spec.problem.kv_heads, spec.problem.head_dim)
    values = [torch.randn(shape, generator=generator) for shape in (q_shape, kv_shape, kv_shape, q_shape)]
    if spec.large:
        values[:2] = _large(spec.problem, values[1], generator)
    if spec.all_sizes:
        values = _of_all_sizes(spec.problem, values)
    masks = _masks(spec, generator)
    dtype, device = spec.problem.dtype, spec.problem.device
    as_on_cpu = dtype, torch.device("cpu"), generator
    strides = [randn(tuple(x.shape), kind, *as_on_cpu).stride() for x, kind in zip(values, spec.kinds)]
    if spec.hidden:
        values[:3] = _with_hidden_nans(spec.problem, values, strides, masks)
    q, k, v, grad = (between_nans(x.to(device, dtype), *each) for x, each in zip(values, zip(strides, spec.odd)))
    classes = [stride_class(tuple(x.shape), x.stride(), dtype.itemsize) for x in (q, k, v)]
    problem = replace(spec.problem, strides=(classes[0], classes[1], classes[2]))
    if problem.needs_grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return Example(problem, q, k, v, grad if problem.needs_grad else None, masks)


def _large(problem: Problem, noise: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Make q and k whose scores are very large, very negative or ordinary by row, and far apart or equal within one.

    In the first `width` entries k is one of a few multiples of a vector of signs, and q a multiple of the same
    vector. All are exact in every dtype, so that no rounding decides which key is the largest. In the other
    entries q is zero and k is noise, without which equal scores would leave no gradient.
    """
    q_shape = (problem.batch, problem.q_len, problem.heads, 1)
    kv_shape = (problem.batch, problem.k_len, problem.kv_heads, 1)
    width = 2 ** max(0, problem.head_dim.bit_length() - 2)
    product = LARGEST_SCORE / abs(problem.scale)
    if problem.dtype == torch.float16:
        product = min(product, LARGEST_HALF_PRODUCT)
    top = 2.0 ** math.floor(math.log2(product / width))
    ordinary = 2.0 ** -math.floor(math.log2(abs(problem.scale) * top * width))
    signs = torch.randint(2, (1, 1, problem.kv_heads, width), generator=generator) * 2.0 - 1
    k = noise.clone()
    k[..., :width] = signs * _pick({1.0: 3, 0.75: 47, 0.5: 47, 0.25: 3}, kv_shape, generator)
    q = torch.zeros(*q_shape[:3], problem.head_dim)
    rows = _pick({top: 6, -top: 6, top / 16: 34, -top / 16: 34, top * ordinary: 15, 0.0: 5}, q_shape, generator)
    q[..., :width] = rows * signs.repeat_interleave(problem.heads // problem.kv_heads, 2)
    return [q, k]


def _of_all_sizes(problem: Problem, values: list[Tensor]) -> list[Tensor]:
    """Give q, k, v and the gradient rows of zeros, rows of denormal numbers, and entries of head_dim a thousand
    times larger and smaller than others, whose products are ordinary.
    """
    factors = torch.ones(4, problem.head_dim, dtype=torch.float64)
    factors[:, 0] = torch.tensor([1 / OUTLIER, OUTLIER, OUTLIER, 1 / OUTLIER])
    factors[:2, 1:2] = torch.tensor([[OUTLIER], [1 / OUTLIER]])
    values = [x * factor for x, factor in zip(values, factors)]
    for number, x in enumerate(values):
        x[:, number::8] = 0.0
        x[:, number + 4 :: 8] = x[:, number + 4 :: 8].sign() * torch.finfo(problem.dtype).smallest_normal / 8
    return values


def _with_hidden_nans(
    problem: Problem, values: list[Tensor], strides: list[tuple[int, ...]], masks: dict[str, Tensor]
) -> list[Tensor]:
    """Fill queries of q and keys of k and v that are hidden, in all of an expanded axis, with NaN and inf in turn."""
    hidden = Hidden.of(problem, masks)
    keys = hidden.keys if hidden.biased is None else keys_hidden_together(*hidden.biased)
    filled = []
    for x, steps, where in zip(values, strides, (hidden.queries, keys, keys)):
        bits = torch.tensor([math.nan, math.inf, -math.inf]).repeat(-(-x.shape[1] // 3))[: x.shape[1]]
        for axis in range(3):
            where = where.all(axis, keepdim=True) if where is not None and steps[axis] == 0 else where
        filled.append(x if where is None else torch.where(where.cpu(), bits[:, None, None], x))
    return filled


def _pick(weights: dict[float, int], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a tensor of values with the given weights, float32 [shape]."""
    chances = torch.tensor(list(weights.values()), dtype=torch.float32)
    drawn = torch.multinomial(chances, math.prod(shape), replacement=True, generator=generator)
    return torch.tensor(list(weights), dtype=torch.float32)[drawn].view(shape)


def _masks(spec: CaseSpec, generator: torch.Generator) -> dict[str, Tensor]:
    problem, masks = spec.problem, {}
    if problem.has_seq_lens:
        lens = [problem.q_len - problem.q_len // 5, problem.q_len]
        lens = ([0, *lens] if spec.empty else lens)[: problem.batch]
        masks["seq_lens"] = torch.tensor(lens, device=problem.device).to(torch.int32 if spec.odd_masks else torch.int64)
    if problem.has_key_mask:
        visible = torch.rand(problem.batch, problem.k_len, generator=generator) < 0.75
        visible[:, -1] = True
        if spec.empty:
            visible[-1] = False
        masks["key_mask"] = visible.to(problem.device)
    masks |= score_tensors(problem, generator, hides=True, empty=spec.empty)
    hard = spec.hidden or spec.empty or spec.odd_masks
    masks |= pattern_data(problem, generator, hard=hard, hides=spec.hidden)
    if spec.low and problem.alibi_axes:
        masks["alibi_slopes"] *= HUGE_SCORE
    if spec.low and problem.bias:
        bias, low = masks["bias"], max(-spec.low, torch.finfo(problem.dtype).min)
        rows = torch.tensor([low, -LARGEST_SCORE, 0.0], dtype=torch.float64)[torch.arange(problem.q_len) % 3, None]
        masks["bias"] = torch.where(bias.isfinite(), rows.to(bias), bias)
    for name, x in masks.items():
        strides = tuple(step * (2 if spec.odd_masks else 1) for step in x.stride())
        masks[name] = between_nans(x.detach(), strides, spec.odd[0]).requires_grad_(x.requires_grad)
    return masks


def between_nans(values: Tensor, strides: tuple[int, ...], odd: bool = False) -> Tensor:
    """Copy the values into a view with these strides, with NaN, or ones, between and around. Axes of stride 0 have
    one entry. With `odd` it begins one entry past an aligned address.
    """
    sizes = [size if stride else 1 for size, stride in zip(values.shape, strides)]
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    room = max(span, SPAN * values.numel()) + 2 * NAN_MARGIN + odd
    rest = math.nan if values.is_floating_point() else 1
    base = torch.full((room,), rest, dtype=values.dtype, device=values.device)
    once = tuple(slice(size) for size in sizes)
    base.as_strided(sizes, strides, NAN_MARGIN + odd).copy_(values[once])
    return base.as_strided(values.shape, strides, NAN_MARGIN + odd)


@contextmanager
def nan_memory(problem: Problem, *, in_torch: bool) -> Iterator[None]:
    """Put NaN into newly allocated memory.

    Args:
        in_torch: fill every tensor that Python code gets from torch.empty and its variants, forward and backward.
            Otherwise, and for kernels' own allocations, only freed memory holds NaN, which may be allocated again.
    """
    _free_nan_blocks(problem)
    # Where a mode cannot ignore compiler internals, code that first runs under one is never compiled.
    if in_torch and hasattr(DispatchMode, "ignore_compile_internals"):
        with _NanFactories():
            yield
    else:
        yield


class _NanFactories(DispatchMode):  # type: ignore[misc]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # By default PyTorch wraps the method below so that its first call loads torch._dynamo, for a second or more.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN and result.dtype in DTYPES:
            result.fill_(math.nan)
        return result


def _free_nan_blocks(problem: Problem) -> None:
    """Free blocks full of NaN as large as the results, in their dtype and in the accumulation dtype."""
    rows = problem.batch * problem.q_len * problem.heads
    keys = problem.batch * problem.k_len * problem.kv_heads
    wide = sum_dtype(problem.dtype)
    sizes = {rows, rows * problem.head_dim, keys * problem.head_dim}
    for dtype in {problem.dtype, wide}:
        for size in sizes:
            # Alive at the same time, so that they are different blocks.
            blocks = [torch.full((size,), math.nan, dtype=dtype, device=problem.device) for _ in range(COPIES)]
            del blocks
