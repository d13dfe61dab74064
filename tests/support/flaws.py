"""Backends with one flaw each, and what of it is found in which class of problems."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch.backends import manual
from attn_dispatch.kernels import formula
from attn_dispatch.kernels.contract import SCORE_TERMS, Backend, Refusal, Result
from attn_dispatch.kernels.hidden import Hidden
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem

#: Tests of NaN in all new memory, for which a mode has to leave torch's compiler alone.
FILLED = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="this torch fills only memory that was freed"
)


@dataclass
class Planted(Backend):
    """A backend with one flaw, which counts its calls. `compute` is called as `run` is."""

    compute: Callable[..., Result] = manual.run
    name: str = "planted"
    reasons: list[Refusal] = field(default_factory=list[Refusal])
    edition: str = "1"
    calls: int = 0
    seen: list[Problem] = field(default_factory=list[Problem])

    def version(self) -> str:
        return self.edition

    def refusals(self, problem: Problem) -> list[Refusal]:
        return self.reasons

    def workspace_bytes(self, problem: Problem) -> int:
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.calls += 1
        self.seen.append(problem)
        return self.compute(q, k, v, problem, **tensors)


@dataclass
class Other(Planted):
    """A backend as another package has it, which computes and refuses what `manual` does."""

    score_terms = SCORE_TERMS

    def refusals(self, problem: Problem) -> list[Refusal]:
        return self.reasons or manual.refusals(problem)

    def workspace_bytes(self, problem: Problem) -> int:
        return 2 * manual.workspace_bytes(problem)


def scored(softmax: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], *, zeroed: bool = True) -> Callable[..., Result]:
    """The formula with another softmax, which is handed scores and counts. `zeroed`: what no query sees is 0."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Result:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = Hidden.of(problem, tensors).zeroed(q, k, v) if zeroed else (q, k, v)
        keys, values = (x.to(wide).repeat_interleave(problem.heads // problem.kv_heads, 2) for x in (k, v))
        counts = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads, **tensors)
        p, lse = softmax(torch.einsum("bqhd,bkhd->bhqk", q.to(wide) * problem.scale, keys), counts)
        return torch.einsum("bhqk,bkhd->bqhd", p, values).to(q.dtype), lse

    return run


def without_maximum(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    weights = counts * scores.exp()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0), total.squeeze(-1).log()


def maximum_of_all(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum over keys that may not be seen, too."""
    most = scores.amax(-1, keepdim=True)
    weights = counts * (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    some = total.clamp(min=1e-15)
    return weights / some, (some.log() + most).masked_fill(total == 0, -math.inf).squeeze(-1)


def not_a_number(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores + counts.to(scores.dtype).log()
    return scores.softmax(-1), scores.logsumexp(-1)


def mean_of_all(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A large negative number in place of -inf."""
    scores = scores + counts.to(scores.dtype).log().clamp(min=-1e30)
    return scores.softmax(-1), scores.logsumexp(-1).masked_fill(~counts.bool().any(-1), -math.inf)


def small_mask_value(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """-1000 is negative enough for ordinary scores."""
    p, lse = formula.softmax(torch.where(counts > 0, scores, -1000.0), counts.clamp(min=1))
    seen = counts.bool().any(-1)
    return p * seen.unsqueeze(-1), lse.masked_fill(~seen, -math.inf)


def top_left(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """The first query meets the first key."""

    def softmax(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return formula.softmax(scores, torch.ones_like(scores).tril() if problem.pattern == Dense(True) else counts)

    return scored(softmax)(q, k, v, problem, **tensors)


def ignoring(name: str) -> Callable[..., Result]:
    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        return manual.run(q, k, v, problem, **{key: mask for key, mask in tensors.items() if key != name})

    return run


def changed(change: Callable[[Tensor, Tensor, Problem], Result]) -> Callable[..., Result]:
    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        return change(*manual.run(q, k, v, problem, **tensors), problem)

    return run


def half_a_tile(out: Tensor, lse: Tensor, problem: Problem) -> Result:
    if problem.q_len % 128 == 64:
        out = torch.cat([out[:, :-64], 0 * out[:, -64:]], 1)
    return out, lse


def one_query(out: Tensor, lse: Tensor, problem: Problem) -> Result:
    return (0.5 * out if problem.q_len == 1 else out), lse


class Unwritten(torch.autograd.Function):
    """Copies all but the last row of what it is handed, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: bool) -> Tensor:
        ctx.backward = backward
        return x.clone() if backward else all_but_the_last(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (all_but_the_last(grads[0]) if ctx.backward else grads[0]), None


def all_but_the_last(x: Tensor) -> Tensor:
    written = torch.empty_like(x)
    written[:, :-1] = x[:, :-1]
    return written


def partial_write(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    out, lse = manual.run(q, k, v, problem, **tensors)
    return (Unwritten.apply(out, False), lse) if problem.needs_grad else (all_but_the_last(out), lse)  # type: ignore[no-untyped-call]


def partial_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    return manual.run(Unwritten.apply(q, True), k, v, problem, **tensors)  # type: ignore[no-untyped-call]


class Nan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * torch.where(grads[0] == grads[0].max(), math.nan, 1.0)


class ReadsOn(torch.autograd.Function):
    """Takes the gradient of out for contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return as_contiguous(grads[0])


def as_contiguous(x: Tensor) -> Tensor:
    """What a kernel reads that is told no strides."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def contiguous(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    return manual.run(q, as_contiguous(k), v, problem, **tensors)


def strides_of_k(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    return manual.run(q, k, v.as_strided(v.shape, k.stride()), problem, **tensors)


def dense_mask(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    mask = tensors.pop("key_mask")
    return manual.run(q, k, v, problem, key_mask=as_contiguous(mask), **tensors)


def whole_tiles(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """Reads values up to the tile's end; their weights are 0, but what they hold is not."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    batch, length, heads, head_dim = v.shape
    tile = v.as_strided((batch, -(-length // 16) * 16, heads, head_dim), v.stride())
    return out + (0 * tile[:, length:]).sum().to(out.dtype), lse


def wrong_lse(out: Tensor, lse: Tensor, problem: Problem) -> Result:
    return out, lse * 1.005


def nan_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    return manual.run(Nan.apply(q), k, v, problem, **tensors)  # type: ignore[no-untyped-call]


def gradient_read_on(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    out, lse = manual.run(q, k, v, problem, **tensors)
    return ReadsOn.apply(out), lse  # type: ignore[no-untyped-call]


def where(condition: Callable[..., bool]) -> Callable[..., Result]:
    """Wrong where a condition holds of the call's tensors."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        out, lse = manual.run(q, k, v, problem, **tensors)
        return (1.5 * out if condition(q=q, k=k, v=v, problem=problem, **tensors) else out), lse

    return run


def odd(x: Tensor) -> bool:
    """Whether vectors of 16 bytes cannot be loaded from where it begins."""
    return x.data_ptr() % 16 != 0


def denormal(x: Tensor) -> bool:
    return bool(((x != 0) & (x.abs() < torch.finfo(x.dtype).smallest_normal)).any())


def odd_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    out, lse = manual.run(q, k, v, problem, **tensors)
    out.register_hook(lambda grad: 1.5 * grad if odd(grad) else grad)  # type: ignore[no-untyped-call]
    return out, lse


def zero_queries(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """As where scores are divided by the norm of q."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    return torch.where((q == 0).all(-1, keepdim=True), 1.5 * out, out), lse


def dense_seq_lens(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    tensors["seq_lens"] = as_contiguous(tensors["seq_lens"])
    return manual.run(q, k, v, problem, **tensors)


def scratch() -> Callable[..., Result]:
    """Keeps its values where another call finds them, for which it waits a while: a machine may be busy."""
    kept, inside = dict[str, Tensor](), threading.Barrier(2)

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        kept["v"] = v.clone()
        if inside.broken:  # nobody came while the last call waited
            inside.reset()
        with suppress(threading.BrokenBarrierError):
            inside.wait(0.1)
        return manual.run(q, k, kept["v"], problem, **tensors)

    return run


def memo() -> Callable[..., Result]:
    """Knows tensors by their addresses."""
    kept: dict[Any, Result] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        found = manual.run(q, k, v, problem, **tensors)
        return kept.setdefault((q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape), found)

    return run


def buffer() -> Callable[..., Result]:
    """Returns the same memory for each length."""
    kept: dict[Any, Tensor] = {}
    return changed(lambda out, lse, _: (kept.setdefault(out.shape, torch.empty_like(out)).copy_(out), lse))


LARGE, EMPTY = "192 tokens, large scores", "77 queries, 40 keys, odd addresses, rows without keys"
PACKED, SCATTERED = "77 tokens, packed views", "77 tokens, scattered views of all sizes"
HIDDEN = "192 tokens, NaN that is hidden, rows without keys"
FLAWS: dict[str, tuple[str, Callable[..., Result], tuple[str, ...]]] = {
    "no-maximum": ("causal-grouped", scored(without_maximum), (f"{LARGE}: out has NaN", f"{LARGE}: dq has NaN")),
    "maximum-of-all": ("causal-grouped", scored(maximum_of_all), (f"{LARGE}: out is off by", f"{LARGE}: lse is off")),
    "small-mask-value": ("causal-grouped", scored(small_mask_value), (f"{LARGE}: out is off", f"{LARGE}: dv is off")),
    "nan-without-keys": ("causal-grouped", scored(not_a_number), (f"{EMPTY}: out has NaN", f"{EMPTY}: dq has NaN")),
    "mean-without-keys": ("causal-grouped", scored(mean_of_all), (f"{EMPTY}: out is off by", f"{EMPTY}: dv is off")),
    "top-left": ("causal-grouped", top_left, (f"{EMPTY}: out is off by", f"{EMPTY}: lse is off by")),
    "key-mask": (
        "both-masks",
        ignoring("key_mask"),
        ("packed views, rows without keys: out is off by", "large scores, rows without keys: dk is off by"),
    ),
    "seq-lens": (
        "both-masks",
        ignoring("seq_lens"),
        ("77 tokens, odd addresses, rows without keys: out is off by", "one token, rows without keys: lse is off by"),
    ),
    "half-a-tile": ("dense", changed(half_a_tile), (f"{LARGE}: out is off by",)),
    "one-query": ("dense", changed(one_query), ("one query: out is off by",)),
    "partial-write": ("longnet", partial_write, ("out has NaN",) * 5),
    "partial-gradient": ("longnet", partial_gradient, ("dq has NaN",) * 5),
    "contiguous": ("dense", contiguous, (f"{PACKED}: out has NaN", f"{SCATTERED}: out has NaN")),
    "strides-of-k": ("dense", strides_of_k, (f"{PACKED}: out is off by", f"{SCATTERED}: out")),
    "dense-mask": ("both-masks", dense_mask, ("packed views, rows without keys: out is off by",)),
    "gradient-read-on": ("dense", gradient_read_on, (f"{PACKED}: dv is off by", f"{SCATTERED}: dv has NaN")),
    "hidden-masked": ("window-key-mask", scored(formula.softmax, zeroed=False), (f"{HIDDEN}: out has NaN",)),
    "hidden-padding": ("longnet", scored(formula.softmax, zeroed=False), (f"{HIDDEN}: out has NaN",)),
    "hidden-unselected": ("uncovered", scored(formula.softmax, zeroed=False), (f"{HIDDEN}: dk has NaN",)),
    "whole-tiles": ("dense", whole_tiles, (f"{PACKED}: out has NaN",)),
    "lse": ("dense", changed(wrong_lse), ("lse is off by",) * 5),
    "lse-without-keys": ("uncovered", changed(lambda out, lse, _: (out, lse.clamp(min=-99))), ("lse is off by inf",)),
    "other-types": (
        "dense",
        changed(lambda out, lse, _: (out.double(), lse.mT)),
        ("is torch.float64, not", "lse has shape"),
    ),
    "address-of-q": ("dense", where(lambda q, **_: odd(q)), ("odd addresses: out is off by",)),
    "address-of-v": ("dense", where(lambda v, **_: odd(v)), ("odd addresses: out is off by",)),
    "address-of-k-alone": ("dense", where(lambda q, k, **_: odd(k) and not odd(q)), (f"{SCATTERED}: out is off by",)),
    "address-of-the-gradient": ("dense", odd_gradient, ("odd addresses: dv is off by",)),
    "address-of-the-mask": ("both-masks", where(lambda key_mask, **_: odd(key_mask)), ("odd addresses, rows without",)),
    "seq-lens-with-a-stride": ("both-masks", dense_seq_lens, ("packed views, rows without keys: out is off by",)),
    "expanded-over-rows": ("dense", where(lambda k, **_: k.stride(0) == 0), (f"{SCATTERED}: out is off by",)),
    "keys-over-100": ("dense", where(lambda k, **_: bool(k.abs().max() > 100)), (f"{SCATTERED}: out is off by",)),
    "values-over-100": ("dense", where(lambda v, **_: bool(v.abs().max() > 100)), (f"{SCATTERED}: out is off by",)),
    "zero-queries": ("dense", zero_queries, (f"{SCATTERED}: out is off by",)),
    "denormal-keys": ("dense", where(lambda k, **_: denormal(k)), (f"{SCATTERED}: out is off by",)),
    "denormal-queries": ("dense", where(lambda q, **_: denormal(q)), (f"{SCATTERED}: out is off by",)),
    "nan-gradient": ("dense", nan_gradient, ("dq has NaN",) * 5),
}
