"""FlexAttention with the kernel of flash-attn 4 in the place of PyTorch's: `BACKEND="FLASH"`, which PyTorch calls
experimental. For patterns that `flash` has no argument for.

Source: PyTorch 2.13, torch/_inductor/kernel/flex/flex_flash_attention.py; flash-attn-4 at 0251105 (2026-08),
flash_attn/cute/interface.py and block_sparsity.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.branches import flash4
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.dense import CUDA_HEAD_ALIGN, VERSION
from attn_dispatch.kernels.flex import attention
from attn_dispatch.kernels.limits import dotted
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

name = "flex_flash"

RELEASE = (2, 11)  #: of torch, the first with it
PATTERNS = (Window, Dilated, Neighborhood)
# Past a head_dim of 128 Hopper's kernel has blocks of fewer keys than the tables.
LIMITS = flash4.HOPPER._replace(highest=(11, 0), masks=True, least_head_dim=16, head_dim=128, repeatable_head_dim=0)


def version() -> str:
    """The versions of PyTorch and of flash-attn 4. Raises PackageNotFoundError without the second."""
    return f"{torch.__version__} {flash4.PACKAGE.distribution} {flash4.PACKAGE.version()}"


def refusals(problem: Problem) -> list[Refusal]:
    found = LIMITS.refusals(problem) + attention.refusals(problem, PATTERNS)
    if problem.device.type != LIMITS.device:
        return found
    found += flash4.PACKAGE.refusals()
    if VERSION < RELEASE:
        found.append(Refusal("release", f"is in torch {dotted(RELEASE)} and newer, this is {torch.__version__}"))
    if problem.head_dim % CUDA_HEAD_ALIGN:
        found.append(Refusal("head_dim", f"takes multiples of {CUDA_HEAD_ALIGN}, not {problem.head_dim}"))
    if problem.needs_grad and problem.return_lse:
        found.append(Refusal("lse", "its backward pass takes no gradient of lse"))
    return found or flash4.PACKAGE.load_refusals()


def workspace_bytes(problem: Problem) -> int:
    """Those of `flex`, and of the sums in float32 of a backward pass, in whole blocks."""
    q, k = problem.q_len + attention.BLOCK, problem.k_len + attention.BLOCK
    rows = problem.batch * (problem.heads * q + 2 * problem.kv_heads * k) * problem.needs_grad
    return attention.workspace_bytes(problem) + 4 * rows * (problem.head_dim + 32)


def first_call_ms(problem: Problem) -> float:
    """Estimated compile time with empty caches; 0 if already compiled."""
    found = _compiled.peek(problem, NATURAL)
    return 0.0 if found is not None and found.ready else flash4.COMPILE_MS


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    refuse_tangents(name, q, k, v)
    flash4.library()
    return attention.run(q, k, v, problem, _compiled(problem, NATURAL), **tensors)


def block(problem: Problem) -> int:
    """Tokens per side of a block: two tiles of queries on Blackwell, where a program computes two."""
    return flash4.queries_together(problem.device)


_compiled = attention.kept(lambda problem, order: attention.made(problem, order, block(problem)))
flops, forget = attention.flops, _compiled.forget
