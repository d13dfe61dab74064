"""PyTorch's dense attention kernels, called as ops: forward returns lse, backward takes any out and lse.

`scaled_dot_product_attention` neither returns nor takes lse, and the context manager that selects its kernel takes
longer than a small attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.limits import ANY, HALF, LARGEST_GRID, Gap, Limits
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES

aten = torch.ops.aten
# The binding saves 2 to 3 us a call over the same op reached through `torch.ops`.
_cpu_flash: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None) or (
    aten._scaled_dot_product_flash_attention_for_cpu
)

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CUDA_HEAD_ALIGN = 8  #: elements; the CUDA kernels read rows in whole vectors
VECTOR_BYTES = 16  #: of one load of a CUDA kernel
EFFICIENT_LSE_ALIGN = 32  #: rows; the memory-efficient backward reads lse in whole tiles

# Source: PyTorch's own checks, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
CPU_FLASH = Limits("cpu", dict.fromkeys(DTYPES, ANY), masks=True)
FLASH3 = Limits(
    "cuda",
    dict.fromkeys(HALF, (9, 0)),
    highest=(9, 0),
    head_dim=256,
    repeatable_head_dim=192,
    most_rows=LARGEST_GRID,
)
CUDA_FLASH = Limits(
    "cuda",
    dict.fromkeys(HALF, (8, 0)),
    head_dim=256,
    gap=Gap(192, 224, (((8, 6), (8, 9)), ((12, 0), (12, 1)))),
    most_rows=LARGEST_GRID,
    rocm=True,
    instead={"FA3": FLASH3},
)
CUDA_EFFICIENT = Limits(
    "cuda",
    {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)},
    masks=True,
    most_rows=LARGEST_GRID,
    rocm=True,
)


class Kernel(Protocol):
    """Dense attention on [batch, len, heads, head_dim] tensors with any strides and no empty axis.

    `grouped`: takes fewer key and value heads than query heads. `masks`: takes an additive mask. One may also have
    `backward_of_both`, as `backward` with the gradient of lse [batch, heads, q_len] after that of out.
    """

    grouped: bool
    masks: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """out like q, or in `sum_dtype`, and lse [batch, heads, q_len].

        A row with all keys masked has out 0 and an undefined lse.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv for `p = exp(scale q k^T + mask - lse)`; rows with lse = inf contribute 0."""
        ...


class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu`: float16, bfloat16, float32, float64; any head_dim."""

    # Tested with 2.13; older releases get one key head per query head.
    grouped = VERSION >= (2, 13)
    masks = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        out, lse = _cpu_flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), lse

    def specialized(self, is_causal: bool, scale: float, heads_first: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        """A function of q, k, v and problem, with last stride 1: see `contract.Backend`."""

        def run_heads_first(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
            out, lse = _cpu_flash(q, k, v, 0.0, is_causal, scale=scale)
            return out, lse

        def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out, lse = _cpu_flash(q, k, v, 0.0, is_causal, scale=scale)
            return out.transpose(1, 2), lse

        return run_heads_first if heads_first else run

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out = (heads_first(x) for x in (grad, q, k, v, out))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CudaFlash:
    """`_scaled_dot_product_flash_attention`: float16 and bfloat16, capability 8.0 and newer, no mask."""

    grouped = torch.version.hip is None  # by flash_api.cpp of CUDA builds
    masks = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        q, k, v = (heads_first(vector_aligned(x)) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return out.transpose(1, 2)[..., :d], lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, q_len, k_len = q.shape[-1], q.shape[1], k.shape[1]
        grad, q, k, v, out = (heads_first(vector_aligned(x)) for x in (grad, q, k, v, out))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q_len, k_len, 0.0, is_causal, unused, unused, scale=scale
        )
        dq, dk, dv = (x.transpose(1, 2)[..., :d] for x in grads)
        return dq, dk, dv


class CudaEfficient:
    """`_scaled_dot_product_efficient_attention`: float16, bfloat16, float32; takes a mask in the dtype of q."""

    grouped = False
    masks = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        d, q_len = q.shape[-1], q.shape[1]
        bias = _bias(mask, q, k)
        q, k, v = (heads_first(vector_aligned(x)) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
        return out.transpose(1, 2)[..., :d], lse[:, :, :q_len]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, bias = q.shape[-1], _bias(mask, q, k)
        # The kernel ignores the row strides of lse and out and assumes contiguous rows.
        lse = pad(lse, (0, -lse.shape[-1] % EFFICIENT_LSE_ALIGN), value=torch.inf).contiguous()
        grad, q, k, v, out = (heads_first(vector_aligned(x)) for x in (grad, q, k, v, out.contiguous()))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, unused, unused, 0.0, wanted, is_causal, scale=scale
        )
        return dq.transpose(1, 2)[..., :d], dk.transpose(1, 2)[..., :d], dv.transpose(1, 2)[..., :d]


def heads_first(x: Tensor) -> Tensor:
    """[batch, len, heads, head_dim] to [batch, heads, len, head_dim] with last stride 1."""
    # The kernels ignore the last stride and assume 1.
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


def vector_aligned(x: Tensor) -> Tensor:
    """x with rows padded and aligned to whole vectors: a misaligned read destroys the CUDA context."""
    x = x.resolve_neg()  # not every library does
    missing = -x.shape[-1] % CUDA_HEAD_ALIGN
    if missing:
        # pad keeps the memory order, in which head_dim may not be last.
        return pad(x, (0, missing)).contiguous()
    # The memory-efficient kernel also checks the stride of an axis of one element, which may be any number.
    aligned = all(stride * x.itemsize % VECTOR_BYTES == 0 for stride in x.stride()[:-1])
    return x if aligned and _whole_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _whole_rows(x: Tensor) -> bool:
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1]
    whole = all(stride and stride * x.itemsize % VECTOR_BYTES == 0 for stride in strides)
    # A meta tensor has no address: use its offset.
    start = x.storage_offset() * x.itemsize if x.device.type == "meta" else x.data_ptr()
    return whole and x.stride(-1) == 1 and start % VECTOR_BYTES == 0


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in q's dtype and full shape, with rows aligned to whole vectors."""
    if mask is None:
        return None
    keys = k.shape[1]
    mask = mask.to(q.dtype)
    if not _whole_rows(mask):
        # With the last axis padded to whole vectors, all other strides are multiples of one.
        room = mask.new_empty(*mask.shape[:3], keys + -keys % CUDA_HEAD_ALIGN)
        mask = room[..., :keys].copy_(mask)
    return mask.expand(q.shape[0], q.shape[2], q.shape[1], keys)


def with_lse_column(
    grad_lse: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad, q, k, v and out with one more column, so that a kernel's backward includes the gradient of lse.

    dS = P * (dP - rowsum(grad * out) + grad_lse), but kernels compute rowsum(grad * out) themselves. The column is zero
    in q, k and v, and adds -grad_lse to the sum as a product of two square roots: float16 holds those.

    Args:
        grad_lse: [batch, q_len, heads]. grad, q, out: [batch, q_len, heads, head_dim].
    """
    grad_lse = grad_lse.unsqueeze(-1)
    root = grad_lse.abs().sqrt()
    grad = torch.cat([grad, root.to(grad.dtype)], dim=-1)
    out = torch.cat([out, (-grad_lse.sign() * root).to(out.dtype)], dim=-1)
    return grad, pad(q, (0, 1)), pad(k, (0, 1)), pad(v, (0, 1)), out


def kernel_of(problem: Problem) -> Kernel:
    """The dense kernel for tiles on the problem's device."""
    return CpuFlash() if problem.device.type == "cpu" else CudaEfficient()
