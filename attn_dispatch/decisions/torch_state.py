"""State of PyTorch that a trial must respect: CUDA graph capture, traces, random numbers, modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Problem


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device or on the current one; nothing can be timed then."""
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():  # no device may be waited for
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def preserved_rng(problem: Problem) -> AbstractContextManager[None]:
    """Restore the state of the random number generators after a trial with dropout.

    Only with dropout: the generator belongs to the process, so numbers that other threads draw meanwhile repeat.
    """
    if not problem.dropout_p:
        return nullcontext()
    return torch.random.fork_rng([problem.device] if problem.device.type == "cuda" else [])


def cannot_measure(device: torch.device) -> bool:
    """Whether calls are captured, traced or transformed, so that nothing can be timed."""
    return capturing(device) or tracing.is_traced()


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Run a trial without the caller's autocast, inference mode, saved-tensor hooks (set by checkpointing), default
    device and dispatch modes.
    """

    def identity(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(identity, identity),
        torch.device("cpu"),
        _disable_current_modes(),
    ):
        yield
