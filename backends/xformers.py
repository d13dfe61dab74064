"""Memory-efficient attention of xformers or MSLK, forward with lse and backward; they choose among their kernels.

Source: xformers 0.0.35, ops/fmha; MSLK 1.3.0, mslk/attention/fmha, from which xformers imports it since ca6d2aa
(2026-04).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.branches.backend import Branched, Package, Variant, flash_version
from attn_dispatch.kernels.dense import DenseCall, Kernel, vector_aligned
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits
from attn_dispatch.machine.environment import installed
from attn_dispatch.text import one_line

FLASH = Limits("cuda", dict.fromkeys(HALF, (8, 0)), head_dim=256, repeatable_head_dim=0, most_rows=LARGEST_GRID)
CUTLASS = Limits(
    "cuda",
    {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)},
    highest=(9, 0),
    head_dim=65536,
    most_rows=LARGEST_GRID,
)


class MemoryEfficient(Kernel):
    """`memory_efficient_attention_forward_requires_grad` and `memory_efficient_attention_backward`.

    Args:
        documents: the library's mask of those of a row.
        packs: whether lse of documents is [1, heads, tokens].
    """

    tokens_first = True

    def __init__(self, documents: Any = None, packs: bool = False) -> None:
        self.documents, self.packs = documents, packs

    def packed(self, lengths: tuple[int, ...], device: torch.device) -> MemoryEfficient:
        masks: Any = importlib.import_module(PACKAGE.load().LowerTriangularMask.__module__)
        return MemoryEfficient(masks.BlockDiagonalMask.from_seqlens(lengths, device=device))

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        ops = PACKAGE.load()
        op, bias = ops.memory_efficient_attention_forward_requires_grad, self._bias(ops, is_causal)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            refuse_tangents("xformers", q, k, v)
            return op(q, k, v, bias, 0.0, scale)

        return run

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        ops = PACKAGE.load()
        # Its kernels ignore the row strides of lse and out and assume contiguous rows.
        grad, out, q, k, v = map(vector_aligned, (grad, out.contiguous(), *call[:3]))
        grads = ops.memory_efficient_attention_backward(
            grad, out, lse.contiguous(), q, k, v, self._bias(ops, call.is_causal), 0.0, call.scale
        )
        return tuple(x[..., : call.q.shape[-1]] for x in grads)

    def _bias(self, ops: Any, is_causal: bool) -> Any:
        # It aligns the first query with the first key; causal pieces are square, so the last ones are aligned too.
        if self.documents is None:
            return ops.LowerTriangularMask() if is_causal else None
        return self.documents.make_causal() if is_causal else self.documents


def fault(ops: Any) -> str:
    """Without its compiled part every kernel refuses CUDA, those too that are PyTorch's own (ops/fmha/common.py)."""
    if not hasattr(ops, "memory_efficient_attention_forward_requires_grad"):
        return f"its attention is in package mslk, which is not installed ({MSLK.hint})"
    library: Any = importlib.import_module("xformers")
    if getattr(library, "_has_cpp_library", True):
        return ""
    error = library._cpp_lib._cpp_library_load_exception
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"its compiled part does not fit this PyTorch, and without it no kernel runs on CUDA: {one_line(error)}"
    return f"{text}; nvidia-cuda-runtime-cu12 has it: load it first, by ctypes" if "libcudart" in text else text


MSLK = Package(
    "mslk", "pip install mslk --index-url https://download.pytorch.org/whl/cu130", "mslk.attention.fmha", (1,)
)
MSLK_OF_PYPI = MSLK._replace(distribution="mslk-cuda", hint="pip install mslk-cuda")
# xformers.ops: it may fail to import where xformers does not, as beside another release of flash-attn.
XFORMERS = Package("xformers", "pip install 'attn-dispatch[xformers]'", "xformers.ops", (0, 0, 29), fault)


def chosen() -> Package:
    """MSLK where it is installed: it needs no compiled part here, which PyPI's xformers has for CUDA 12."""
    return next((each for each in (MSLK, MSLK_OF_PYPI) if not each.refusals()), XFORMERS)


PACKAGE = chosen()
PACKED = PACKAGE._replace(oldest=max(PACKAGE.oldest, (0, 0, 35)))  #: in older ones documents may have another lse
CALLED = ("flash-attn", "flash_attn_3")  #: fmha/flash.py takes the first before PyTorch's, flash3.py the second


def version() -> str:
    """The versions of the package and of those whose kernels it may call: PyTorch and what it finds at its import.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    others = [f"{name} {version}" for name in CALLED if (version := installed(name))]
    return " ".join((PACKAGE.distribution, PACKAGE.version(), "torch", flash_version(), *others))


BACKEND = Branched(
    "xformers",
    (
        Variant(FLASH, lambda problem: MemoryEfficient(packs=not PACKED.refusals()), "flash", PACKAGE),
        Variant(CUTLASS, lambda problem: MemoryEfficient(), "cutlass", PACKAGE),
    ),
    version,
)

name, refusals = BACKEND.name, BACKEND.refusals
flops, workspace_bytes = BACKEND.flops, BACKEND.workspace_bytes
run, specialized, specialized_trains = BACKEND.run, BACKEND.specialized, True
run_documents, takes_documents = BACKEND.run_documents, BACKEND.takes_documents
