"""PyTorch's FlexAttention: a fused kernel, compiled for each problem, that skips empty blocks."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.contract import Refusal, refuse_device, refuse_dropout, refuse_dtype, refuse_ranks
from attn_dispatch.kernels.dense import VERSION
from attn_dispatch.kernels.flex import attention, documents, requirements
from attn_dispatch.kernels.limits import capability, dotted
from attn_dispatch.machine.environment import installed
from attn_dispatch.spec.orders import NATURAL, Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

name = "flex"
score_terms = ("softcap", "bias", "alibi_slopes")
takes_data = True

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_RELEASE = (2, 13)  #: of torch; the CPU kernel is not tested with older ones
CUDA_HEAD_DIM = 16  #: the least for tl.dot
CUDA_CAPABILITY = (7, 0)  #: the oldest that Triton supports
CPU_COMPILE_MS = 15_000.0  #: of a C++ kernel
CUDA_COMPILE_MS = 10_000.0  #: of a Triton kernel
PATTERNS = (Dense, Window, Dilated, Neighborhood, Reordered)


def version() -> str:
    """PyTorch's version, and that of Triton, which compiles its kernels for CUDA."""
    return " ".join(filter(None, (str(torch.__version__), installed("triton"))))


def refusals(problem: Problem) -> list[Refusal]:
    found = refuse_ranks(problem) + refuse_dropout(problem) + refuse_device(problem, ("cpu", "cuda"))
    tables = attention.refusals(problem, PATTERNS)
    found += tables
    if {"pattern", "lengths"} & {refusal.code for refusal in tables} or not attention.compiling:
        return found
    found += refuse_dtype(problem, DTYPES)
    if problem.device.type == "cpu":
        return found + _refuse_cpu(problem)
    return found + (_refuse_cuda(problem) if problem.device.type == "cuda" else [])


def _refuse_cpu(problem: Problem) -> list[Refusal]:
    found = []
    if problem.needs_grad:
        found.append(Refusal("gradient", "its CPU kernel has no backward"))
    if problem.return_lse:
        found.append(Refusal("lse", "its CPU kernel returns no lse"))
    if VERSION < CPU_RELEASE:
        needed = dotted(CPU_RELEASE)
        text = f"its CPU kernel is used with torch {needed} and newer, not {torch.__version__}"
        found.append(Refusal("release", text))
    return [*found, *requirements.refusals()]


def _refuse_cuda(problem: Problem) -> list[Refusal]:
    found = []
    if problem.head_dim < CUDA_HEAD_DIM:
        found.append(Refusal("head_dim", f"needs head_dim >= {CUDA_HEAD_DIM} on CUDA, not {problem.head_dim}"))
    if importlib.util.find_spec("triton") is None:
        found.append(Refusal("not_installed", "package triton is not installed (pip install 'attn-dispatch[triton]')"))
    has = capability(problem.device)
    if has is not None and has < CUDA_CAPABILITY:
        text = f"Triton needs compute capability {dotted(CUDA_CAPABILITY)}, this device has {dotted(has)}"
        found.append(Refusal("capability", text))
    return found


def first_call_ms(problem: Problem) -> float:
    """Estimated compile time with an empty compile cache; 0 if already compiled."""
    found = _compiled.peek(problem, NATURAL)
    if not attention.compiling or (found is not None and found.ready):
        return 0.0
    if problem.device.type == "cpu":
        return CPU_COMPILE_MS
    return CUDA_COMPILE_MS * (3 if problem.needs_grad else 1)


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = NATURAL, **tensors: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    refuse_tangents(name, q, k, v, tensors.get("bias"), tensors.get("alibi_slopes"))
    return attention.run(q, k, v, problem, _compiled(problem, order), **tensors)


def takes_documents(problem: Problem) -> bool:
    return documents.takes(problem) and not refusals(documents.as_ranges(problem))


def run_documents(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...], **tensors: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    refuse_tangents(name, q, k, v, tensors.get("alibi_slopes"))
    compiled = _compiled(documents.as_ranges(problem), NATURAL)
    return documents.run(q, k, v, problem, lengths, compiled, tensors)


_compiled = attention.kept(attention.made)
forget = _compiled.forget
orders, flops, workspace_bytes = attention.orders, attention.flops, attention.workspace_bytes
