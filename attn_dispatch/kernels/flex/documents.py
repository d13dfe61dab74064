"""Packed rows of documents as intervals: one kernel for documents of all lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.kernels.device_cache import DeviceCache
from attn_dispatch.kernels.flex import attention
from attn_dispatch.spec.data import Ranges, RangesForm
from attn_dispatch.spec.problem import Problem


def takes(problem: Problem) -> bool:
    """Whether what a query sees in its document is intervals."""
    pattern = problem.pattern
    return not pattern.branches and pattern.bands(problem.q_len, problem.k_len, ()) is not None


@lru_cache(maxsize=4096)
def as_ranges(problem: Problem) -> Problem:
    """The problem of packed rows, with the form of their intervals."""
    bands = problem.pattern.bands(problem.q_len, problem.k_len, ()) or ()
    return replace(problem, pattern=RangesForm(len(bands), by_row=False))


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    lengths: tuple[int, ...],
    compiled: attention.CompiledAttention,
    tensors: dict[str, Tensor],
) -> Tensor | tuple[Tensor, Tensor]:
    """A backend's `run_documents`, by the kernel of `as_ranges`."""
    data, start = _ranges(problem, lengths)
    broken = _broken(start, q, k, v)
    if broken is not None:
        q, k, v = (x.masked_fill(broken[:, :, None, None], 0.0) for x in (q, k, v))
    result = attention.run(q, k, v, as_ranges(problem), compiled, pattern_data=data, **tensors)
    if broken is None:
        return result
    out, lse = (result, None) if isinstance(result, Tensor) else result
    out = out.masked_fill(broken[:, :, None, None], math.nan)
    return out if lse is None else (out, lse.masked_fill(broken[:, None], math.nan))


def _broken(start: Tensor, *tensors: Tensor) -> Tensor | None:
    """Tokens of documents that hold NaN or infinity, bool [batch, len]; None: none are.

    Blocks of the kernel hold tokens of several documents, and 0 * NaN is NaN.
    """
    sums = sum(x.detach().sum((2, 3), dtype=torch.float32) for x in tensors)
    bad = ~torch.as_tensor(sums).isfinite()
    if bad.device.type == "cpu" and not bad.any():
        return None
    return torch.zeros_like(bad, dtype=torch.int32).index_add_(1, start, bad.int())[:, start] > 0


def _ranges_of(problem: Problem, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The data of the intervals, and the start of each token's document."""
    sizes = torch.tensor(lengths)
    stop = sizes.cumsum(0).repeat_interleave(sizes)
    start = stop - sizes.repeat_interleave(sizes)
    inside = torch.arange(problem.q_len) - start
    bands = problem.pattern.bands(problem.q_len, problem.k_len, ()) or ()
    first, last = map(torch.stack, zip(*(band.between(inside, problem.k_len) for band in bands)))
    found = Ranges((start + first)[None], (start + last).minimum(stop - 1)[None])
    return found.data.to(problem.device), start.to(problem.device)


_ranges = DeviceCache(_ranges_of, most=64)  #: a training step has new lengths
