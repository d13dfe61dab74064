"""Hard cases: small problems of the caller's class that are known to break kernels, for the gate.

They share dtype, head_dim, kind of pattern, masks, direction and the rest with the caller's problem; lengths, batch and
heads are small. Every run is poisoned: memory that a backend did not write, or should not have read, is NaN.
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
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch.kernels.contract import Backend, forced_orders
from attn_dispatch.kernels.hidden import Hidden, unseen
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import DTYPES, Problem
from attn_dispatch.spec.reordered import Reordered
from attn_dispatch.spec.strides import randn, stride_class
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Gate, Verdict

KEPT = 8  #: classes whose cases are kept, a few MiB each
LARGEST_SCORE = 1e4
LARGEST_HALF_PRODUCT = 2.0**15  #: of q and k, before it is scaled: float16 ends at 65504
GIVEN_SCALE = 0.75  #: times the default, in place of any scale that is given
MOST_GROUP = 3  #: query heads for each head of k and v
MOST_BRANCHES = 6  #: that heads are dealt out to
EVEN, ODD, SHORT = 192, 77, 40  #: tokens: a tile of 128 and a half; tiles of nothing
MANY_KEYS = 130  #: for one query
CACHE_ROWS = 51  #: of a cache of keys that are not filled yet
GRIDS = {EVEN: ((192,), (16, 12), (8, 6, 4)), ODD: ((77,), (11, 7), (5, 5, 3))}
PACKED, CACHE = "packed", "cache"  #: two more memory orders: one of q, k, v side by side; the first rows of a cache

Strides = tuple[int, ...]

MARGIN = 4096  #: entries before and after a view; a multiple of what tensors are aligned to
SPAN = 3  #: dense tensors of the shape that the memory has room for: who mistakes the strides reads NaN, and not beyond
COPIES = 3  #: freed blocks of each size
_ATEN = torch.ops.aten
_UNWRITTEN = {
    getattr(_ATEN, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a hard case is made from; `kinds` are the memory orders of q, k, v and the gradient of out."""

    hazard: str
    problem: Problem
    kinds: tuple[str, ...]
    empty: bool = False  #: a batch row without keys for each of the masks
    large: bool = False  #: scores up to LARGEST_SCORE
    odd_masks: bool = False  #: seq_lens in 32 bits, key_mask with gaps
    hidden: bool = False  #: NaN and infinity in what no query sees, and in padding queries


@dataclass(frozen=True, slots=True)
class HardCase:
    """A small problem that is known to break kernels, its tensors, and what should come out."""

    name: str
    problem: Problem
    gate: Gate
    seals: tuple[Seal, ...]

    def refused_by(self, backend: Backend, order: str = NATURAL) -> bool:
        """Whether the backend does not take this problem in this order, and so cannot be held to it."""
        if backend.refusals(self.problem):
            return True
        return order != NATURAL and order not in forced_orders(backend, self.problem)

    def run(self, backend: Backend, order: str = NATURAL) -> dict[str, Tensor]:
        """The backend's tensors, in poisoned memory. Whatever the backend raises is passed on.

        A backend that compiles is not traced with the poison; it gets what freed memory holds.

        Raises:
            RuntimeError: it wrote into its inputs, or to memory beside them.
        """
        try:
            with poisoned(self.problem, in_torch=not hasattr(backend, "first_call_ms")):
                found = self.gate.run(backend, order)
        finally:
            # The tensors are kept for the next backend, which must find them as they were.
            broken = [seal.name for seal in self.seals if seal.broken()]
        if broken:
            raise RuntimeError(f"{self.name}: wrote into {', '.join(broken)}, or to memory beside")
        return found

    def check(self, found: dict[str, Tensor]) -> Verdict:
        """Compare what `run` gave; each failure starts with the case's name."""
        verdict = self.gate.check(found)
        return replace(verdict, failures=tuple(f"{self.name}: {failure}" for failure in verdict.failures))


def hard_cases(problem: Problem) -> tuple[HardCase, ...]:
    """The hard cases of a problem's class, worked out once. None where the sequence is sharded."""
    return _cases(class_key(problem))


def class_key(problem: Problem) -> tuple[Spec, ...]:
    """What the hard cases are made from: problems with equal keys have the same ones."""
    if problem.ranks > 1:
        return ()
    own = (*map(_whole, problem.strides), "bnhd")
    unequal = isinstance(problem.pattern, Dense | Window) and not problem.has_seq_lens
    small = partial(_small, problem)
    masks = problem.has_seq_lens + problem.has_key_mask
    hides = problem.masked or unseen(small(1, EVEN)) is not None
    return (
        Spec("large scores", small(1, EVEN), own, large=True),
        Spec("", small(1 + masks, ODD, SHORT if unequal else ODD), own, empty=True),
        Spec("", small(max(2, 1 + masks), 1, MANY_KEYS if unequal else 1), own, empty=True),
        Spec("packed views", small(2, ODD), (PACKED, PACKED, CACHE, "bhnd"), odd_masks=True),
        Spec("scattered views", small(2, ODD), ("bndh", "nhd+expanded:b", "bdnh", "d+expanded:bnh"), odd_masks=True),
        *[Spec("NaN that is hidden", small(2, EVEN), own, hidden=True)] * hides,
    )


# --- small problems ---------------------------------------------------------------------------------------------------


def _small(problem: Problem, batch: int, q_len: int, k_len: int | None = None) -> Problem:
    pattern = fitted(problem.pattern, q_len)
    grid = pattern.natural.grid if isinstance(pattern.natural, Neighborhood) else None
    q_len = q_len if grid is None else math.prod(grid)
    k_len = q_len if k_len is None or grid is not None else k_len
    heads, kv_heads = _few_heads(problem)
    default = math.pow(problem.head_dim, -0.5)
    return replace(
        problem,
        pattern=pattern.simplify(q_len, k_len, heads),
        batch=batch,
        q_len=q_len,
        k_len=k_len,
        heads=heads,
        kv_heads=kv_heads,
        scale=default if problem.default_scale else math.copysign(GIVEN_SCALE * default, problem.scale),
        dropout_p=0.0,
    )


def _few_heads(problem: Problem) -> tuple[int, int]:
    """Heads, and heads of k and v: few, but grouped where the problem's are."""
    group = problem.heads // problem.kv_heads
    group = min(next((n for n in range(2, group + 1) if group % n == 0), 1), MOST_GROUP)
    least = 2
    pattern = problem.pattern.natural
    if isinstance(pattern, Dilated) and pattern.heads == "split":
        least = min(len(pattern.branches), MOST_BRANCHES)
    kv_heads = min(problem.kv_heads, max(2, -(-least // group)))
    return kv_heads * group, kv_heads


def fitted(pattern: Pattern, length: int) -> Pattern:
    """A pattern of the same kind for about this many tokens."""
    if isinstance(pattern, Window):
        left, right = (None if side is None else min(side, length // 4) for side in (pattern.left, pattern.right))
        return Window(left, right, min(pattern.sinks, length // 4))
    if isinstance(pattern, Dilated):
        return replace(pattern, segment_lengths=_segments(pattern, length))
    if isinstance(pattern, Neighborhood):
        return _neighborhood(pattern, length)
    return replace(pattern, pattern=fitted(pattern.pattern, length)) if isinstance(pattern, Reordered) else pattern


def _segments(pattern: Dilated, length: int) -> tuple[int, ...]:
    """In proportion, the shortest about a quarter of the sequence; still multiples of their rates where they were."""
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
    window = tuple(min(w, (size // step - 1) | 1) for w, size, step in zip(pattern.window, grid, dilation))
    return replace(pattern, grid=grid, window=window, dilation=dilation)


def _whole(kind: str) -> str:
    """A stride class with the axes that had one entry put back where they belong."""
    name, *flags = kind.split("+")
    for order in ("bnhd", "bhnd"):
        if name == "".join(axis for axis in order if axis in name):
            return "+".join([order, *flags])
    return kind


# --- tensors ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=KEPT)
def _cases(specs: tuple[Spec, ...]) -> tuple[HardCase, ...]:
    return tuple(map(_case, specs))


def _case(spec: Spec) -> HardCase:
    generator = torch.Generator().manual_seed(0)
    q_shape = (spec.problem.batch, spec.problem.q_len, spec.problem.heads, spec.problem.head_dim)
    kv_shape = (spec.problem.batch, spec.problem.k_len, spec.problem.kv_heads, spec.problem.head_dim)
    values = [torch.randn(shape, generator=generator) for shape in (q_shape, kv_shape, kv_shape, q_shape)]
    if spec.large:
        values[:2] = _large(spec.problem, values[1], generator)
    masks = _masks(spec, generator)
    if spec.hidden:
        values[:3] = _fouled(spec.problem, values, masks)
    dtype, device = spec.problem.dtype, spec.problem.device
    strides = [_strides(tuple(x.shape), kind, dtype) for x, kind in zip(values, spec.kinds)]
    q, k, v, grad = (framed(x.to(device, dtype), each) for x, each in zip(values, strides))
    classes = [stride_class(tuple(x.shape), x.stride(), dtype.itemsize) for x in (q, k, v)]
    problem = replace(spec.problem, strides=(classes[0], classes[1], classes[2]))
    if problem.needs_grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    example = Example(problem, q, k, v, grad if problem.needs_grad else None, masks)
    gate = Gate.of(example)
    if gate.grad is not None and len(gate.rows) * len(gate.heads) == problem.q_len * problem.heads:
        gate = replace(gate, grad=grad)  # the same values in a memory order that is not the usual one
    tensors = {"q": q, "k": k, "v": v, "the gradient": grad, **example.masks}
    return HardCase(_name(spec, gate), problem, gate, tuple(Seal.of(*item) for item in tensors.items()))


def _name(spec: Spec, gate: Gate) -> str:
    problem = spec.problem
    if problem.q_len == problem.k_len:
        lengths = "one token" if problem.q_len == 1 else f"{problem.q_len} tokens"
    else:
        lengths = "one query" if problem.q_len == 1 else f"{problem.q_len} queries, {problem.k_len} keys"
    empty = bool((gate.expected["lse"].value == -math.inf).any())
    return ", ".join([lengths, *[spec.hazard] * bool(spec.hazard), *["rows without keys"] * empty])


def _large(problem: Problem, noise: Tensor, generator: torch.Generator) -> list[Tensor]:
    """q and k whose scores are very large, very negative or ordinary by the row, and far apart or equal within it.

    In their first entries k is one of a few multiples of a vector of signs, and q a multiple of the same: all are
    exact in every dtype, so that no rounding decides which key is the largest. Behind them q is zero and k is noise,
    without which equal scores would leave no gradient.
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


def _fouled(problem: Problem, values: list[Tensor], masks: dict[str, Tensor]) -> list[Tensor]:
    """q, k and v with NaN, inf and -inf, token by token, in what never matters."""
    hidden = Hidden.of(problem, masks.get("seq_lens"), masks.get("key_mask"))
    fouled = []
    for x, where in zip(values, (hidden.queries, hidden.keys, hidden.keys)):
        bits = torch.tensor([math.nan, math.inf, -math.inf]).repeat(-(-x.shape[1] // 3))[: x.shape[1]]
        fouled.append(x if where is None else torch.where(where.cpu(), bits[:, None, None], x))
    return fouled


def _pick(weights: dict[float, int], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each of the values about as often as its weight says."""
    chances = torch.tensor(list(weights.values()), dtype=torch.float32)
    drawn = torch.multinomial(chances, math.prod(shape), replacement=True, generator=generator)
    return torch.tensor(list(weights), dtype=torch.float32)[drawn].view(shape)


def _masks(spec: Spec, generator: torch.Generator) -> dict[str, Tensor]:
    problem, masks = spec.problem, {}
    if problem.has_seq_lens:
        lens = [problem.q_len - problem.q_len // 5, problem.q_len]
        lens = ([0, *lens] if spec.empty else lens)[: problem.batch]
        kind = torch.int32 if spec.odd_masks else torch.int64
        masks["seq_lens"] = torch.tensor(lens, dtype=kind, device=problem.device)
    if problem.has_key_mask:
        kept = torch.rand(problem.batch, problem.k_len, generator=generator) < 0.75
        kept[:, -1] = True
        if spec.empty:
            kept[-1] = False
        # A view of every second entry: to whoever reads what lies between, other keys may be seen.
        beside = torch.stack([kept, ~kept], -1).to(problem.device)
        masks["key_mask"] = beside[..., 0] if spec.odd_masks else beside[..., 0].contiguous()
    return masks


def _strides(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Strides:
    _, length, heads, head_dim = shape
    if kind == PACKED:
        row = 3 * heads * head_dim
        return length * row, row, head_dim, 1
    if kind == CACHE:
        head = (length + CACHE_ROWS) * head_dim
        return heads * head, head_dim, head, 1
    return randn(shape, kind, dtype, torch.device("cpu"), torch.Generator()).stride()


def framed(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values in this memory order, with NaN between them and on both sides. Axes of stride 0 keep one entry."""
    sizes = [size if stride else 1 for size, stride in zip(values.shape, strides)]
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    room = max(span, SPAN * values.numel()) + 2 * MARGIN
    base = torch.full((room,), math.nan, dtype=values.dtype, device=values.device)
    once = tuple(slice(size) for size in sizes)
    base.as_strided(sizes, strides, MARGIN).copy_(values[once])
    return base.as_strided(values.shape, strides, MARGIN)


@dataclass(frozen=True, slots=True)
class Seal:
    """A tensor's whole memory as it was, what lies around the view included."""

    name: str
    memory: Tensor
    copy: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Seal:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return cls(name, memory, memory.clone())

    def broken(self) -> bool:
        """Whether something was written since; it is as it was afterwards."""
        broken = not torch.equal(self.memory, self.copy)
        if broken:
            self.memory.copy_(self.copy)
        return broken


@contextmanager
def poisoned(problem: Problem, *, in_torch: bool) -> Iterator[None]:
    """NaN in memory that is handed out.

    Args:
        in_torch: what Python code gets from torch.empty and its kin, forward and backward, is NaN for certain.
            Otherwise, and for what kernels allocate themselves, freed memory holds NaN, which may be given out again.
    """
    _foul(problem)
    # Where a mode cannot be told to leave compiled code alone, code that is first met under one is never compiled.
    if in_torch and hasattr(TorchDispatchMode, "ignore_compile_internals"):
        with _Poison():  # type: ignore[no-untyped-call]
            yield
    else:
        yield


class _Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN and result.dtype in DTYPES:
            result.fill_(math.nan)
        return result


def _foul(problem: Problem) -> None:
    """Leave NaN in freed blocks as large as the results, in their dtype and in what sums are kept in."""
    rows = problem.batch * problem.q_len * problem.heads
    keys = problem.batch * problem.k_len * problem.kv_heads
    wide = sum_dtype(problem.dtype)
    sizes = {rows, rows * problem.head_dim, keys * problem.head_dim}
    for dtype in {problem.dtype, wide}:
        for size in sizes:
            # Alive together, so that they are different blocks.
            blocks = [torch.full((size,), math.nan, dtype=dtype, device=problem.device) for _ in range(COPIES)]
            del blocks
