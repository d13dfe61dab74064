"""PyTorch's dense attention kernels, called as ops: forward returns lse, backward takes any out and lse.

`scaled_dot_product_attention` neither returns nor takes lse, and the context manager that selects its kernel takes
longer than a small attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.autograd import gradients, once_differentiable
from attn_dispatch.kernels.contract import Result
from attn_dispatch.kernels.limits import ANY, HALF, LARGEST_GRID, Gap, Limits, lacking
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.private import of_torch
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES

aten = torch.ops.aten


@cache
def binding(name: str) -> Any:
    """torch's binding of an op, which saves 2 to 3 us a call over the same op reached through `torch.ops`."""
    return of_torch(f"torch:{name}", None) or of_torch(f"torch:ops.aten.{name}")


_cpu_flash = binding("_scaled_dot_product_flash_attention_for_cpu")
_sdpa = binding("scaled_dot_product_attention")  # not the function of torch.nn, which others replace

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CUDA_HEAD_ALIGN = 8  #: elements; the CUDA kernels read rows in whole vectors
VECTOR_BYTES = 16  #: of one load of a CUDA kernel
#: Rows; the memory-efficient backward reads lse in whole tiles, and on ROCm takes it as it is.
EFFICIENT_LSE_ALIGN = 1 if torch.version.hip else 32

# Source: PyTorch's own checks, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
CPU_FLASH = Limits(
    "cpu",
    dict.fromkeys(DTYPES, ANY),
    masks=True,
    lacks=lacking("_scaled_dot_product_flash_attention_for_cpu"),
)
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
    dropout=True,
    most_rows=LARGEST_GRID,
    rocm=True,
    instead={"FA3": FLASH3._replace(repeatable_head_dim=0)},  # see backends/flash.py
    lacks=lacking("_scaled_dot_product_flash_attention"),
)
CUDA_EFFICIENT = Limits(
    "cuda",
    {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)},
    masks=True,
    most_rows=LARGEST_GRID,
    rocm=True,
    lacks=lacking("_scaled_dot_product_efficient_attention"),
)
ANY_SDPA = Limits("", dict.fromkeys(DTYPES, ANY), repeatable_head_dim=0, lse=False, masks=True)


@dataclass(slots=True)
class Drawn:
    """A call's dropout: its probability, and how a forward pass drew, which the backward pass repeats."""

    p: float
    state: tuple[Any, ...] = ()


class DenseCall(NamedTuple):
    """One call of a dense kernel.

    Args:
        q: [batch, q_len, heads, head_dim]. k, v: [batch, k_len, kv_heads, head_dim]. Any strides, no empty axis.
        is_causal: queries see no key after their own position; q_len is k_len.
        mask: added to the scores, [1 or batch, 1 or heads, 1 or q_len, k_len].
        drawn: its dropout, of kernels with `state_at`; None: none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float
    mask: Tensor | None = None
    drawn: Drawn | None = None


class Kernel:
    """Dense attention.

    `grouped`: takes fewer key and value heads than query heads. `masks`: takes a mask. `takes_grad_lse`: `backward`
    takes the gradient of lse. `allocates`: copies of rows, or wider sums. `reads_vectors`: see `vector_aligned`.
    `tokens_first`: its op takes [batch, len, heads, head_dim]. `packs`: there is a `packed` one. `differentiates`:
    autograd has a formula for its op, which gives the bits of `backward` sooner. `gives_lse`: `forward` returns it;
    otherwise any numbers, and `backward` does not read them. `state_at`: where its op returns after lse how it drew.
    """

    limits: Limits  #: of kernels for several patterns
    grouped = False
    masks = False
    takes_grad_lse = False
    allocates = reads_vectors = gives_lse = True
    tokens_first = packs = differentiates = False
    state_at: tuple[int, ...] = ()

    def packed(self, lengths: tuple[int, ...], device: torch.device) -> Kernel:
        """This kernel for a batch of one row that holds documents of these lengths, each as a call of its own."""
        raise NotImplementedError

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        """out like q, or in `sum_dtype`, and lse [batch, heads, q_len].

        A row with all keys masked has out 0 and an undefined lse.
        """
        given: Any = map(vector_aligned, call[:3]) if self.reads_vectors else call[:3]
        op, (batch, q_len, heads, d) = self.bound(call.is_causal, call.scale), call.q.shape
        assert op is not None
        more = {} if call.mask is None else self._masked(call)
        more |= {} if call.drawn is None else {"dropout_p": call.drawn.p}
        out, lse, *others = op(*(given if self.tokens_first else map(heads_first, given)), **more)
        if call.drawn is not None:
            call.drawn.state = tuple(others[at] for at in self.state_at)
        out = out if self.tokens_first else out.transpose(1, 2)
        # Some pad head_dim, or lse, to which others add an axis.
        lse = lse if lse.shape == (batch, heads, q_len) else lse.reshape(batch, heads, -1)[:, :, :q_len]
        return out if out.shape[-1] == d else out[..., :d], lse

    def _dropped(self, call: DenseCall) -> tuple[Any, ...]:
        """dropout_p, and how `forward` drew."""
        if call.drawn is not None:
            return call.drawn.p, *call.drawn.state
        return 0.0, *[torch.empty((), dtype=torch.int64, device=call.q.device)] * len(self.state_at)

    def _masked(self, call: DenseCall) -> dict[str, Any]:
        """The op's argument that has the mask."""
        raise NotImplementedError

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv for `p = exp(scale q k^T + mask - lse)`; rows with lse = inf contribute 0.

        Args:
            grad: of out. grad_lse: [batch, heads, q_len], for kernels that take it.
        """
        raise NotImplementedError

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]] | None:
        """The op, bound to all but q, k and v in its layout with last stride 1: out, lse, and what is not used.
        None: calls need more than the op.
        """
        return None

    def _taken(self, strides: tuple[int, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of the op's results as its own backward pass takes them; `strides` are those of out."""
        grad, *rest = grads
        return grads if _address(grad) % VECTOR_BYTES == 0 else (grad.clone(), *rest)

    def specialized(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, heads_first: bool
    ) -> Callable[..., Result] | None:
        """A function of tensors like q, k and v, and the problem; None: there is none. See `contract.Backend`."""
        call = self.bound(is_causal, scale)
        if call is None or any(x.stride(-1) != 1 for x in (q, k, v)):
            return None
        vectors = self.reads_vectors  # of tensors as vector_aligned leaves them, addresses alone can differ
        if vectors and not all(vector_aligned(x) is x for x in (q, k, v)):
            return None
        turned = heads_first == self.tokens_first
        batch, heads, rows = (q if heads_first else q.transpose(1, 2)).shape[:3]

        def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
            if vectors and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES:
                q, k, v = map(vector_aligned, (q, k, v))
            if turned:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out, lse, *_ = call(q, k, v)
            if out.requires_grad:  # by autograd's formula. No hook holds a tensor: those of saved ones may free it
                node: Any = out.grad_fn
                node.register_prehook(partial(self._taken, out.stride()))
                node.register_hook(once_differentiable)
            out = out.transpose(1, 2) if turned else out
            # Some add an axis to lse, or rows.
            return (out, lse.reshape(batch, heads, -1)[:, :, :rows]) if problem.return_lse else out

        return run


class CpuFlash(Kernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: float16, bfloat16, float32, float64; any head_dim."""

    limits = CPU_FLASH
    # Tested with 2.13; older releases get one key head per query head.
    grouped = VERSION >= (2, 13)
    masks = True
    allocates = reads_vectors = False

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:  # sooner than by `bound`
        q, k, v = heads_first(call.q), heads_first(call.k), heads_first(call.v)
        out, lse = _cpu_flash(q, k, v, 0.0, call.is_causal, attn_mask=call.mask, scale=call.scale)
        return out.transpose(1, 2), lse

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        return partial(_cpu_flash, dropout_p=0.0, is_causal=is_causal, scale=scale)

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        grad, q, k, v, out = (heads_first(x) for x in (grad, call.q, call.k, call.v, out))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, call.is_causal, attn_mask=call.mask, scale=call.scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CudaFlash(Kernel):
    """`_scaled_dot_product_flash_attention`: float16 and bfloat16, capability 8.0 and newer, no mask."""

    grouped = torch.version.hip is None  # by flash_api.cpp of CUDA builds
    differentiates = True
    state_at = 4, 5

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        op = binding("_scaled_dot_product_flash_attention")
        return partial(op, dropout_p=0.0, is_causal=is_causal, return_debug_mask=False, scale=scale)

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        grad, q, k, v, out = (heads_first(vector_aligned(x)) for x in (grad, *call[:3], out))
        p, *drew = self._dropped(call)
        saved = q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, *saved, p, call.is_causal, *drew, scale=call.scale
        )
        return tokens_first(call.q.shape[-1], dq, dk, dv)


class CudaEfficient(Kernel):
    """`_scaled_dot_product_efficient_attention`: float16, bfloat16, float32; takes a mask in the dtype of q."""

    limits = CUDA_EFFICIENT
    masks = differentiates = True
    state_at = 0, 1

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        op = binding("_scaled_dot_product_efficient_attention")
        return partial(op, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=is_causal, scale=scale)

    def _masked(self, call: DenseCall) -> dict[str, Any]:
        return {"attn_bias": _bias(call)}

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # The kernel ignores the row strides of lse and out and assumes contiguous rows.
        lse = pad(lse, (0, -lse.shape[-1] % EFFICIENT_LSE_ALIGN), value=torch.inf).contiguous()
        grad, q, k, v, out = (heads_first(vector_aligned(x)) for x in (grad, *call[:3], out.contiguous()))
        p, *drew = self._dropped(call)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _bias(call), out, lse, *drew, p, wanted, call.is_causal, scale=call.scale
        )
        return tokens_first(call.q.shape[-1], dq, dk, dv)


class Sdpa(Kernel):
    """`scaled_dot_product_attention` itself, by which a device takes the kernel it has."""

    limits = ANY_SDPA
    masks = differentiates = True
    reads_vectors = gives_lse = False

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in call[:3])
        lse, mask = q.new_zeros(q.shape[:3], dtype=sum_dtype(q.dtype)), call.mask
        if mask is None:
            return _sdpa(q, k, v, is_causal=call.is_causal, scale=call.scale).transpose(1, 2), lse
        if call.is_causal:  # not both
            mask = mask + mask.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1)
        empty = (mask == -torch.inf).all(-1, keepdim=True)  # such rows are NaN on some devices
        out = _sdpa(q, k, v, mask.masked_fill(empty, 0.0).to(q.dtype), scale=call.scale)
        return out.masked_fill(empty, 0.0).transpose(1, 2), lse

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in call[:3])
            out, _ = self.forward(call._replace(q=q, k=k, v=v))
        return gradients((out,), (q, k, v), (grad,))

    def specialized(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, heads_first: bool
    ) -> Callable[..., Result]:
        op = partial(_sdpa, is_causal=is_causal, scale=scale)

        def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
            found: Tensor = op(q, k, v) if heads_first else op(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
            return found

        return run


class Products(Kernel):
    """Products and a softmax in `sum_dtype`, with all scores of a call in memory: for tiles, on any device."""

    limits = ANY_SDPA._replace(lse=True, repeatable_head_dim=None)
    masks = True

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        scores, _, _, v = self._scores(call)
        lse = scores.logsumexp(-1)
        p = scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
        return (p @ v).to(call.q.dtype).transpose(1, 2), lse

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        scores, q, k, v = self._scores(call)
        grad, out = (x.transpose(1, 2).to(v.dtype) for x in (grad, out))
        p = (scores - lse.unsqueeze(-1)).exp()
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * call.scale
        return tuple(x.to(call.q.dtype).transpose(1, 2) for x in (ds @ k, ds.mT @ q, p.mT @ grad))

    @staticmethod
    def _scores(call: DenseCall) -> tuple[Tensor, ...]:
        """The scores with the mask, and q, k and v, heads first."""
        q, k, v = (x.transpose(1, 2).to(sum_dtype(x.dtype)) for x in call[:3])
        scores = (q * call.scale) @ k.mT
        return scores if call.mask is None else scores + call.mask, q, k, v


def heads_first(x: Tensor) -> Tensor:
    """[batch, len, heads, head_dim] to [batch, heads, len, head_dim] with last stride 1."""
    # The kernels ignore the last stride and assume 1.
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


def tokens_first(head_dim: int, *results: Tensor) -> tuple[Tensor, ...]:
    """[batch, heads, len, padded head_dim] to [batch, len, heads, head_dim]."""
    return tuple(x.transpose(1, 2)[..., :head_dim] for x in results)


def vector_aligned(x: Tensor) -> Tensor:
    """x with rows padded and aligned to whole vectors: a misaligned read destroys the CUDA context."""
    if _in_vectors(x.shape, x.stride(), x.itemsize) and not x.is_neg() and not _address(x) % VECTOR_BYTES:
        return x
    x = x.resolve_neg()  # not every library does
    missing = -x.shape[-1] % CUDA_HEAD_ALIGN
    if missing:
        # pad keeps the memory order, in which head_dim may not be last.
        return pad(x, (0, missing)).contiguous()
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def _in_vectors(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether rows of this layout are whole vectors, apart from the address of the first."""
    *outer, last = strides
    # The memory-efficient kernel also checks the stride of an axis of one element, which may be any number.
    whole = all(stride * itemsize % VECTOR_BYTES == 0 and (stride or n == 1) for n, stride in zip(shape, outer))
    return whole and last == 1 and shape[-1] % CUDA_HEAD_ALIGN == 0


def _address(x: Tensor) -> int:
    """Where the first entry is: a meta tensor has no address but an offset."""
    return int(x.storage_offset()) * x.itemsize if x.device.type == "meta" else x.data_ptr()


def _bias(call: DenseCall) -> Tensor | None:
    """The mask in q's dtype and full shape, with rows aligned to whole vectors."""
    if call.mask is None:
        return None
    (batch, q_len, heads, _), keys = call.q.shape, call.k.shape[1]
    mask = call.mask.to(call.q.dtype)
    row_strides = [stride for stride, n in zip(mask.stride()[:-1], mask.shape) if n > 1]
    whole = all(stride and stride * mask.itemsize % VECTOR_BYTES == 0 for stride in row_strides)
    if not whole or mask.stride(-1) != 1 or _address(mask) % VECTOR_BYTES:
        # With the last axis padded to whole vectors, all other strides are multiples of one.
        room = mask.new_empty(*mask.shape[:3], keys + -keys % CUDA_HEAD_ALIGN)
        mask = room[..., :keys].copy_(mask)
    return mask.expand(batch, heads, q_len, keys)


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


def kernel_of(problem: Problem, other: type[Kernel] = Sdpa) -> Kernel:
    """The dense kernel that takes masks on the problem's device; `other`: on one that is not `KNOWN`."""
    kinds: dict[str, type[Kernel]] = {"cpu": CpuFlash, "cuda": CudaEfficient}
    return kinds.get(problem.device.type, other)()
