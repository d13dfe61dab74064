"""Random tensors for a problem: the same values for every candidate; drawn on a CPU, on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_dispatch.kernels.contract import Backend, Result, runner
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.strides import randn


@dataclass(frozen=True, slots=True)
class Example:
    """Tensors of a problem's shapes, dtype and strides; `grad` is the gradient of out, None where none is needed.

    q and grad are [batch, q_len, heads, head_dim], k and v [batch, k_len, kv_heads, head_dim].
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor | None
    masks: dict[str, Tensor]

    def call(self, backend: Backend, order: str = NATURAL) -> Callable[[], Result]:
        """The call to time: forward, and backward where the problem needs gradients."""
        run = runner(backend, order)

        def forward() -> Result:
            with torch.no_grad():
                return run(self.q, self.k, self.v, self.problem, **self.masks)

        def forward_backward() -> Result:
            with torch.enable_grad():
                result = run(self.q, self.k, self.v, self.problem, **self.masks)
            out = result if isinstance(result, Tensor) else result[0]
            torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)
            return result

        return forward_backward if self.problem.needs_grad else forward

    def without_dropout(self) -> Example:
        """The same example with dropout 0, so that results can be compared."""
        return replace(self, problem=replace(self.problem, dropout_p=0.0)) if self.problem.dropout_p else self


def example_bytes(problem: Problem) -> int:
    """Bytes that `make` allocates: q, k, v, the gradient of out and the masks."""
    q = problem.batch * problem.q_len * problem.heads * problem.head_dim
    kv = problem.batch * problem.k_len * problem.kv_heads * problem.head_dim
    masks = problem.batch * (8 * problem.has_seq_lens + problem.k_len * problem.has_key_mask)
    return ((2 if problem.needs_grad else 1) * q + 2 * kv) * problem.dtype.itemsize + masks


def make_timed(problem: Problem) -> tuple[Example, float]:
    """The example of a trial, and the seconds that its budget does not include: on CUDA those of drawing it.

    There they are drawn on the device, for a CPU would take a minute for the longest sequences; the first use of the
    device, which may take seconds, falls into them.
    """
    start = time.perf_counter()
    example = make(problem, on_device=True)
    if problem.device.type != "cuda":
        return example, 0.0
    torch.cuda.synchronize(problem.device)
    return example, time.perf_counter() - start


def make(problem: Problem, seed: int = 0, *, on_device: bool = False) -> Example:
    """Draw unit-normal q, k, v and gradient in the problem's memory order, and masks that hide part of the keys.

    Args:
        on_device: whether to draw q, k, v and the gradient on a CUDA device itself: other values than a CPU's.
    """
    generator = torch.Generator().manual_seed(seed)
    values = generator
    if on_device and problem.device.type == "cuda":
        values = torch.Generator(problem.device).manual_seed(seed)
    q_shape = (problem.batch, problem.q_len, problem.heads, problem.head_dim)
    kv_shape = (problem.batch, problem.k_len, problem.kv_heads, problem.head_dim)
    q, k, v = (
        randn(shape, kind, problem.dtype, problem.device, values)
        for shape, kind in zip((q_shape, kv_shape, kv_shape), problem.strides)
    )
    grad = None
    if problem.needs_grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        grad = randn(q_shape, "bnhd", problem.dtype, problem.device, values)
    masks = {}
    if problem.has_seq_lens:
        low = (problem.q_len + 1) // 2
        lens = torch.randint(low, problem.q_len + 1, (problem.batch,), generator=generator)
        masks["seq_lens"] = lens.to(problem.device)
    if problem.has_key_mask:
        visible = torch.rand(problem.batch, problem.k_len, generator=generator) < 0.75
        masks["key_mask"] = visible.to(problem.device)
    return Example(problem, q, k, v, grad, masks)
