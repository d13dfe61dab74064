"""Small calls of attend(), what should come out of them, and a backend that is planted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_dispatch import counters, process_state
from attn_dispatch.backends import manual
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning import gate, invariance
from tests.support.flaws import Planted

BUILT_IN = list(registry.names())
NO_NUMBERS: tuple[Any, ...] = (-1, math.nan, "1", [], 10**400, 1j, torch.tensor([1, 2]))  #: none >= 0
RUN_HERE = ["sdpa", "sdpa_mask", "tiles", "native", "flex", "manual"]  #: what a plain problem on a CPU can be run by


def qkv(length: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, length, 2, 8, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, the same in float64 as in narrower dtypes but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def formula(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, softcap: float | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse in float64, differentiable; 0 and -inf for a query without keys. `seen` [batch, k_len] hides keys."""
    q_len, k_len, heads = q.shape[1], k.shape[1], q.shape[2]
    keys, values = (x.double().repeat_interleave(heads // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        distance = (torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)).abs()
        scores = scores - alibi_slopes.double().view(-1, heads, 1, 1) * distance
    counts = pattern.multiplicity(q_len, k_len, heads).double()
    counts = counts if seen is None else counts * seen[:, None, None]
    seen_scores = scores.detach().masked_fill(counts == 0, -math.inf)
    most = functional.pad(seen_scores, (0, 1), value=-math.inf).amax(-1, keepdim=True)  # there may be no keys
    most = most.masked_fill(most == -math.inf, 0.0)
    weights = counts * (scores - most).masked_fill(counts == 0, 0.0).exp()
    total = weights.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1.0)
    lse = (some.log() + most).masked_fill(total == 0, -math.inf).squeeze(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights / some, values), lse


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


threads = invariance._threads  #: PyTorch computes in so many


def precision(value: str) -> AbstractContextManager[None]:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def forget() -> None:
    """As a new process with the same plug-ins would decide."""
    process_state.forget(process_state.ROUTES, process_state.DECISIONS)


def forget_all() -> None:
    """As in a process that has just started, except that built-in backends have passed the hard cases that they
    passed before: these take most of a small problem's trial. A test that changes a built-in backend forgets FACTS.
    """
    passed = {key for key in gate._passed if key[0] in BUILT_IN}
    process_state.forget_all()
    gate._passed.update(passed)


def forget_native_library() -> None:
    """As a new process would look for the compiled kernel."""
    for cached in (library.prebuilt, library._loaded, library._own_folder):
        cached.cache_clear()
    for noted in (library._failed, library._unloadable):
        noted.clear()
    process_state.forget(process_state.ROUTES)


def later() -> str:
    """A time after everything that was measured so far."""
    return (datetime.now(UTC) + timedelta(minutes=1)).isoformat()


def counted(**expected: int) -> bool:
    return {name: count for name, count in counters().items() if count} == expected


def status(explanation: Explanation, backend: str) -> str:
    return next(candidate.status for candidate in explanation.candidates if candidate.backend == backend)


@dataclass
class Plugin(Planted):
    """Computes once for each q and v and gives that again: nothing is faster, so that only the gate can keep it out."""

    compute: Callable[[Tensor, Tensor], Any] = lambda out, lse: (out, lse)
    release_name: str = "1"
    known: dict[int, tuple[Tensor, Any, int]] = field(default_factory=dict[int, tuple[Tensor, Any, int]])

    def version(self) -> str:
        return self.release_name

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        if problem.needs_grad or v.is_inference():  # which has no version
            return self.compute(*manual.run(q, k, v, problem, **tensors))
        if id(q) not in self.known or self.known[id(q)][2] != v._version:
            self.known[id(q)] = q, self.compute(*manual.run(q, k, v, problem, **tensors)), v._version
        return self.known[id(q)][1]
