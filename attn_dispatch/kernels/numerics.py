"""The dtype of sums, merging partial results in it, and what a problem's formula takes: multiplicity and bias."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attn_dispatch.errors import InvalidInput
from attn_dispatch.private import has_amx
from attn_dispatch.settings import asks_invariance
from attn_dispatch.spec.checks import choice
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES, LAYOUTS, check_tensor

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


def merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    layout: str = "bnhd",
) -> tuple[Tensor, Tensor]:
    """Join the attention over some keys and that over others into the attention over all of them; differentiable.

    a, b = (attend(q, k, v, return_lse=True) for k, v in parts)
    out, lse = merge(*a, *b)

    Args:
        out_a, out_b: [batch, q_len, heads, head_dim], of one dtype; of many parts best float32, as each result is
            rounded to it.
        lse_a, lse_b: [batch, heads, q_len], natural log, float32 (float64 for float64); -inf for a query without
            keys, whose out is 0. flash-attn's own functions give +inf there.
        layout: "bnhd", or "bhnd" for out with its middle axes swapped.

    Returns:
        The joint out and lse, computed in lse's dtype. Two parts without keys give 0 and -inf, and zero gradients.

    Raises:
        InvalidInput: a shape, dtype or device is not as the others need it.

    Source: Milakov & Gimelshein 2018, online softmax; Dao et al. 2022, section 3.1.
    """
    _check_parts(out_a, lse_a, out_b, lse_b, layout)
    share_a, share_b, lse = _joined(lse_a, lse_b)
    a, b = (_by_row(share, layout) for share in (share_a, share_b))
    return (out_a * a + out_b * b).to(out_a.dtype), lse


def _check_parts(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, layout: str) -> None:
    choice("layout", layout, LAYOUTS)
    check_tensor("out_a", out_a, (0, 1, 2, 3))
    if out_a.dtype not in DTYPES:
        raise InvalidInput(f"out_a must be one of {', '.join(map(str, DTYPES))}, got {out_a.dtype}")
    rows = tuple(out_a.shape[layout.index(axis)] for axis in "bhn")
    part, row = (tuple(out_a.shape), out_a.dtype), (rows, sum_dtype(out_a.dtype))
    for name, x, (shape, dtype) in (("out_b", out_b, part), ("lse_a", lse_a, row), ("lse_b", lse_b, row)):
        if not isinstance(x, Tensor):
            raise InvalidInput(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if (tuple(x.shape), x.dtype, x.device) != (shape, dtype, out_a.device):
            needs = f"{name} must be {list(shape)}, {dtype}, on {out_a.device}, as out_a is {out_a.dtype}"
            raise InvalidInput(f"{needs}: got {list(x.shape)}, {x.dtype}, on {x.device}")


def with_sink(out: Tensor, lse: Tensor, sink: Tensor, layout: str = "bnhd") -> tuple[Tensor, Tensor]:
    """out and lse with one more key for each head, whose score is `sink` and whose value is 0; differentiable.

    Args:
        out, lse: as `merge` takes them.
        sink: [heads]; -inf: none.

    Source: Miller 2023, Attention Is Off By One; the GPT-OSS models learn one sink for each head.
    """
    share, _, lse = _joined(lse, sink.to(lse.dtype)[:, None])
    return (out * _by_row(share, layout)).to(out.dtype), lse


def _by_row(share: Tensor, layout: str) -> Tensor:
    return (share.transpose(1, 2) if layout == "bnhd" else share).unsqueeze(-1)


def _joined(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of two parts and the lse of both, and derivatives of any order, which are no NaN at -inf."""
    none_a, none_b = lse_a == -torch.inf, lse_b == -torch.inf
    a, b = (x.masked_fill(none_a & none_b, 0.0) for x in (lse_a, lse_b))
    # -log of a share: as of sigmoid(a - b), but with the digits of a derivative near 0.
    less_a, less_b = _softplus(b - a), _softplus(a - b)
    lse = torch.where(a > b, a + less_a, b + less_b).masked_fill(none_a & none_b, -torch.inf)
    # Filled, so that the gradient of a row without keys, which may be NaN, does not reach the other lse.
    return torch.exp(-less_a).masked_fill(none_a, 0.0), torch.exp(-less_b).masked_fill(none_b, 0.0), lse


def _softplus(x: Tensor) -> Tensor:
    if torch.compiler.is_dynamo_compiling() or not asks_invariance():
        return softplus(x, threshold=LINEAR)
    # PyTorch has one formula for whole vectors of softplus and another for the rest: not so of exp and log1p.
    return torch.maximum(x, x.new_zeros(())) + torch.log1p(torch.exp(-x.abs()))


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
