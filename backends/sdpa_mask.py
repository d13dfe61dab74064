"""PyTorch's fused attention kernels with a dense mask: the bias log c, cached between calls, and that of the caller."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.kernels import numerics
from attn_dispatch.kernels.branches import run as branches
from attn_dispatch.kernels.branches.plan import Block, BranchPlan, Piece, StridedRows, plan_of
from attn_dispatch.kernels.contract import Refusal, Result
from attn_dispatch.kernels.dense import Kernel, kernel_of
from attn_dispatch.kernels.device_cache import DeviceCache
from attn_dispatch.kernels.formula import bounded, score_terms_of
from attn_dispatch.kernels.heads import head_classes, kv_heads_of
from attn_dispatch.spec.data import derived
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tracing import make_plain
from attn_dispatch.text import gib

name = "sdpa_mask"
score_terms = ("bias", "alibi_slopes")
takes_data = True

MASK_LIMIT = 2**30  #: bytes of masks in the cache; above, other backends are better
COPIES = 2  #: of a mask with the caller's bias: while it is added, the sum so far and the next one
ROWS = 512  #: query rows whose multiplicity is computed at once


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    found = kernel_of(problem).limits.refusals(problem)
    needed = mask_bytes(problem)
    if needed > MASK_LIMIT:
        text = f"{problem.pattern} needs a dense mask of {gib(needed)}, over {gib(MASK_LIMIT)}"
        found.append(Refusal("over_memory", text))
    return found


def flops(problem: Problem) -> int:
    pairs = problem.batch * problem.heads * problem.q_len * problem.k_len
    return pairs * problem.head_dim * (14 if problem.needs_grad else 4)


def mask_bytes(problem: Problem) -> int:
    """Bytes of the biases, of the caller's with them, and, with masks, of one bias per batch row."""
    if _is_plain(problem):
        return 0
    one = problem.q_len * problem.k_len * numerics.sum_dtype(problem.dtype).itemsize
    rows, heads = problem.bias or (1, 1)
    rows = problem.batch if _by_row(problem) else rows
    if problem.alibi_axes:
        rows, heads = problem.batch if problem.alibi_axes == 2 else rows, problem.heads
    own = rows * max(heads, len(_head_runs(problem))) * bool(problem.score_terms)
    masked = problem.batch * max(1, heads * bool(problem.score_terms)) * problem.masked
    return one * (len(_head_runs(problem)) * (problem.batch if _by_row(problem) else 1) + COPIES * own + masked)


def _by_row(problem: Problem) -> bool:
    """Whether the pattern holds tensors for each row of the batch."""
    return getattr(problem.pattern, "by_row", False)


def workspace_bytes(problem: Problem) -> int:
    kernel, plan = _prepared(problem)
    counts = 0 if _is_plain(problem) else 16 * min(ROWS, problem.q_len) * problem.k_len
    # Other kernels want the mask in q's dtype.
    copies = 1 if problem.device.type == "cpu" else 2
    return branches.workspace_bytes(problem, plan, kernel) + copies * mask_bytes(problem) + counts


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    kernel, plan = _prepared(problem)
    data, biases = tensors.get("pattern_data"), tuple[branches.Bias, ...]()
    if data is not None:
        biases = derived(data, (name, _key(problem)), lambda: make_plain(_masks, problem, problem.pattern.bound(data)))
    elif not _is_plain(problem):
        biases = _biases(problem)
    return branches.run(q, k, v, problem, plan, kernel, tensors, _with_score_terms(problem, biases, tensors))


def _head_runs(problem: Problem) -> list[range]:
    """The runs of heads with the same multiplicity."""
    return [heads for heads, _ in head_classes(problem.pattern, problem.heads)]


@lru_cache(maxsize=4096)
def _prepared(problem: Problem) -> tuple[Kernel, BranchPlan]:
    kernel = kernel_of(problem)
    if _is_plain(problem):
        plan = plan_of(problem, kernel.grouped)
        assert plan is not None  # every Dense problem has a plan
        return kernel, plan
    plain = problem.heads == problem.kv_heads
    q, k = StridedRows(0, 1, problem.q_len), StridedRows(0, 1, problem.k_len)
    pieces = tuple(
        Piece(q, k, slice(x.start, x.stop, x.step), kv_heads_of(x, problem, kernel.grouped), False, True, plain, number)
        for number, x in enumerate(_head_runs(problem))
    )
    block = Block(slice(0, problem.q_len), slice(0, problem.k_len), pieces, covers_q=True, covers_k=plain)
    return kernel, BranchPlan.of((block,), problem.batch)


def _key(problem: Problem) -> Hashable:
    wide = numerics.sum_dtype(problem.dtype)
    return problem.pattern, problem.q_len, problem.k_len, problem.heads, wide, problem.device


def _masks(problem: Problem, pattern: Pattern | None = None) -> tuple[branches.Bias, ...]:
    wide = numerics.sum_dtype(problem.dtype)
    return tuple(_bias(problem, pattern or problem.pattern, heads[0], wide) for heads in _head_runs(problem))


_biases = DeviceCache(_masks, _key, most_bytes=MASK_LIMIT)
forget = _biases.forget


def _is_plain(problem: Problem) -> bool:
    """Whether no mask is needed."""
    return problem.pattern == Dense() and not problem.score_terms


def _with_score_terms(
    problem: Problem, biases: tuple[branches.Bias, ...], tensors: Mapping[str, Tensor]
) -> tuple[branches.Bias, ...]:
    """The masks with the caller's bias and ALiBi's terms: [1 or batch, 1 or heads, q_len, k_len] each."""
    if not problem.score_terms:
        return biases
    found = []
    for heads, (values, _) in zip(_head_runs(problem), biases):
        added = values
        if "bias" in tensors:
            bias = bounded(tensors["bias"].detach(), values.dtype)
            added = added + (bias if bias.shape[1] == 1 else bias[:, heads.start : heads.stop : heads.step])
        if "alibi_slopes" in tensors:
            rows = torch.arange(problem.q_len, device=values.device)
            slopes = {"alibi_slopes": tensors["alibi_slopes"]}
            alibi = score_terms_of(problem, heads, rows, slopes, values.dtype).added
            assert alibi is not None
            added = added + alibi
        added = torch.where(values == -math.inf, values, added)  # a hidden entry of the bias may be NaN
        found.append(branches.Bias(added, (added != -math.inf).any(-1)))
    return tuple(found)


def _bias(problem: Problem, pattern: Pattern, head: int, dtype: torch.dtype) -> branches.Bias:
    """The bias log c of one head."""
    batch = problem.batch if _by_row(problem) else 1
    values = torch.empty(batch, 1, problem.q_len, problem.k_len, dtype=dtype, device=problem.device)
    seen = torch.empty(batch, 1, problem.q_len, dtype=torch.bool, device=problem.device)
    for start in range(0, problem.q_len, ROWS):
        rows = slice(start, min(start + ROWS, problem.q_len))
        q_pos = torch.arange(rows.start, rows.stop, device=problem.device)
        counts = pattern.multiplicity(problem.q_len, problem.k_len, problem.heads, h_pos=(head,), q_pos=q_pos)
        counts = counts if counts.ndim == 4 else counts[None]
        torch.log(counts.to(dtype), out=values[:, :, rows])
        torch.any(counts, dim=-1, out=seen[:, :, rows])
    return branches.Bias(values, seen)
