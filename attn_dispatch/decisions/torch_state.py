"""The state of PyTorch that a call must respect: capture, random numbers, traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Problem


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be timed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _own_randomness(problem: Problem) -> AbstractContextManager[None]:
    """The caller's random numbers go on as if there had been no trial.

    Only for dropout: the generator is the whole process's, and numbers that other threads draw meanwhile come again.
    """
    if not problem.dropout_p:
        return nullcontext()
    return torch.random.fork_rng([problem.device] if problem.device.type == "cuda" else [])


def unsettled(device: torch.device) -> bool:
    """Whether calls are captured, traced or transformed, so that nothing can be timed: the next plain one decides."""
    return capturing(device) or tracing.amid()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep a trial and its caller apart: autocast, inference mode, saved-tensor hooks (as checkpointing sets them) and
    the default device and torch's dispatch modes do not reach the trial.
    """

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is),
        torch.device("cpu"),
        _disable_current_modes(),
    ):
        yield
