"""The dtype of sums, merging partial results in it, and what a problem's formula takes: multiplicity and bias."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attn_dispatch.private import has_amx
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem

#: Kernels flush smaller scales to 0.
SMALLEST_SCALE = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}
LINEAR = 40.0  #: from which on softplus(x) is x, in float64 too
PACKED = 64  #: entries to a multiple of which AMX's operands are padded


def kernel_bytes(problem: Problem, keys: int) -> int:
    """Upper bound of what PyTorch's kernel allocates on a CPU: tiles of 256 queries and 512 keys in each thread, and
    `keys` rows of keys and values packed for AMX.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    if problem.device.type != "cpu":
        return 0
    packed = 2 * keys * -(-problem.head_dim // PACKED) * PACKED * problem.dtype.itemsize
    tiles = torch.get_num_threads() * 4096 * (512 + problem.head_dim)
    return tiles + packed * (problem.dtype.itemsize < 4 and has_amx())


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Join a partial attention over other keys into `out` and `lse`, in place.

    Args:
        out, out_b: [..., head_dim], float32 or wider.
        lse, lse_b: [...], natural log; -inf for a query without keys. Two such parts give zeros and -inf, not NaN.

    Source: Milakov & Gimelshein 2018, online softmax; Dao et al. 2022, section 3.1.
    """
    share = torch.sigmoid(lse_b - lse)
    # -inf - -inf is NaN: neither side has a key, so the share is 0.
    out.lerp_(out_b, share.nan_to_num_(nan=0.0).unsqueeze(-1))
    torch.logaddexp(lse, lse_b, out=lse)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor, layout: str = "bnhd") -> tuple[Tensor, Tensor]:
    """out and lse with one more key for each head, whose score is `sink` and whose value is 0; differentiable.

    Args:
        out: [batch, queries, heads, head_dim] in layout "bnhd". lse: [batch, heads, queries]; -inf for a query without
            other keys.
        sink: [heads]; -inf: none.

    Source: Miller 2023, Attention Is Off By One; the GPT-OSS models learn one sink for each head.
    """
    score = sink.to(lse.dtype)[:, None]
    empty = lse == -torch.inf
    finite = lse.masked_fill(empty, 0.0)  # derivatives at -inf are NaN, of second order at the latest
    # As sigmoid(finite - score), but with the digits of a derivative near 0.
    share = torch.exp(-softplus(score - finite, threshold=LINEAR)).masked_fill(empty, 0.0)
    lse = torch.where(empty, score, torch.logaddexp(finite, score))
    share = share.transpose(1, 2) if layout == "bnhd" else share
    return (out * share.unsqueeze(-1)).to(out.dtype), lse


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and merged results: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_positive_scale(q: Tensor, problem: Problem) -> tuple[Tensor, Problem]:
    """q and problem with a scale above 0: its sign goes into q, and a scale of 0 makes q zero.

    The kernels add -inf for hidden keys before scaling: a scale of 0 or less would make it NaN or +inf.
    """
    least = SMALLEST_SCALE[sum_dtype(problem.dtype)]
    if problem.scale >= least:
        return q, problem
    sign, size = (0.0, 1.0) if abs(problem.scale) < least else (-1.0, -problem.scale)
    return q * sign, replace(problem, scale=size)


def multiplicity_of(
    problem: Problem, heads: Sequence[int], q_pos: Tensor, tensors: Mapping[str, Tensor]
) -> Tensor | None:
    """The multiplicity [(batch,) heads or 1, queries, keys] of these heads and queries, or None if it is all 1.

    Args:
        tensors: those of the call besides q, k and v, by the names of attend()'s arguments. A bias of -inf hides a key.
    """
    bias = tensors.get("bias")
    if problem.pattern == Dense() and not problem.masked and bias is None:
        return None
    # Most patterns are equal for all heads: one logarithm is then enough.
    alike = not problem.pattern.head_offsets(0, problem.heads)
    sizes, some = (problem.q_len, problem.k_len, problem.heads), heads[:1] if alike else heads
    lens, key_mask = tensors.get("seq_lens"), tensors.get("key_mask")
    pattern = problem.pattern.bound(tensors.get("pattern_data"))
    counts = pattern.multiplicity(*sizes, seq_lens=lens, key_mask=key_mask, h_pos=some, q_pos=q_pos)
    return counts if bias is None else counts * (rows_of_bias(bias, heads, q_pos) != -math.inf)


def rows_of_bias(bias: Tensor, heads: Sequence[int], q_pos: Tensor) -> Tensor:
    """The bias of these heads and queries, [1 or batch, 1 or heads, queries, keys]."""
    return bias[:, torch.as_tensor(heads if bias.shape[1] > 1 else [0], device=bias.device)[:, None], q_pos]
