"""Backends that are wrong in ways that were met elsewhere. Each would win by speed; each must be kept out and named."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.spec.problem import Problem

Fault = Callable[[Tensor, Tensor, Tensor, Problem, dict[str, Tensor]], Any]


def right(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return manual.run(q, k, v, problem, **tensors)


def wrong_out(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    out, lse = right(q, k, v, problem, tensors)
    return out * 1.02, lse


def wrong_lse(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    out, lse = right(q, k, v, problem, tensors)
    return out, lse / math.log(2)


def nan_grad_q(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    """Only where the length leaves 64 over a multiple of 128: no problem of any other length shows it."""
    out, lse = right(q, k, v, problem, tensors)
    if problem.needs_grad and problem.q_len % 128 == 64:
        out = out + (q * 0).sqrt()[:, :, :, : out.shape[3]] * 0  # the gradient of a root at zero: 0 times infinity
    return out, lse


def ignores_mask(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    return right(q, k, v, problem, {name: torch.ones_like(x) for name, x in tensors.items() if name == "key_mask"})


def partial_write(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    """The last row is left as it was found, which is often what the call before wrote there."""
    out, lse = right(q, k, v, problem, tensors)
    whole = torch.empty_like(out)
    whole[:, :-1] = out[:, :-1]
    return whole, lse


def aborts(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    os.abort()


def killed(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    """As the out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    time.sleep(600)


def allocates(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    """More than there is."""
    return right(q, k, v, problem, tensors)[0] + torch.ones(4 * available_bytes(q.device), dtype=torch.uint8).sum()


def lies(q: Tensor, k: Tensor, v: Tensor, problem: Problem, tensors: dict[str, Tensor]) -> Any:
    """Takes 300 MiB, says it takes nothing."""
    scratch = torch.ones(300 << 20, dtype=torch.uint8)
    out, lse = right(q, k, v, problem, tensors)
    return out + (scratch[0] - 1), lse


@dataclass
class Planted:
    """The reference with a fault."""

    fault: Fault = right
    name: str = "planted"
    edition: str = "1"
    calls: int = 0
    seen: list[Problem] = field(default_factory=list[Problem])

    def version(self) -> str:
        return self.edition

    def refusals(self, problem: Problem) -> list[Refusal]:
        return []

    def workspace_bytes(self, problem: Problem) -> int:
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.calls += 1
        self.seen.append(problem)
        return self.fault(q, k, v, problem, tensors)
