"""Backends that are wrong in ways that were met elsewhere. Each would win by speed; each must be kept out and named."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.kernels.contract import Result
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.spec.problem import Problem
from tests.support.flaws import Planted, all_but_the_last, changed, ignoring

__all__ = ["Planted"]

Fault = Callable[..., Any]

right: Fault = manual.run
wrong_out = changed(lambda out, lse, _: (out * 1.02, lse))
wrong_lse = changed(lambda out, lse, _: (out, lse / math.log(2)))
ignores_mask = ignoring("key_mask")
#: The last row is left as it was found, which is often what the call before wrote there.
partial_write = changed(lambda out, lse, _: (all_but_the_last(out), lse))
#: More than there is.
allocates = changed(lambda out, lse, _: (out + torch.ones(4 * available_bytes(out.device), dtype=torch.uint8)[0], lse))
#: Takes 300 MiB, says it takes nothing.
lies = changed(lambda out, lse, _: (out + (torch.ones(300 << 20, dtype=torch.uint8)[0] - 1), lse))


def nan_grad_q(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """Only where the length leaves 64 over a multiple of 128: no problem of any other length shows it."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    if problem.needs_grad and problem.q_len % 128 == 64:
        out = out + (q * 0).sqrt()[:, :, :, : out.shape[3]] * 0  # the gradient of a root at zero: 0 times infinity
    return out, lse


def aborts(*_: object, **__: object) -> Any:
    os.abort()


def killed(*_: object, **__: object) -> Any:
    """As the out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs(*_: object, **__: object) -> Any:
    time.sleep(600)
