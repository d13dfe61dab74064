"""PyTorch's settings that a problem depends on: determinism, float32's precision, the active flash kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention

from attn_dispatch.private import deterministic_or_warning, float32_matmul_precision, only_warning

#: The name of what `activate_flash_attention_impl` put into PyTorch's flash operators for CUDA; None before torch 2.11.
current_flash: Callable[[], str | None] = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)


def deterministic() -> bool:
    """Whether results must have the same bits each time. With `warn_only`, PyTorch's own backward passes only warn."""
    return deterministic_or_warning() and not only_warning()


def matmul_precision() -> str:
    """torch's float32 matmul precision, set by either of its two interfaces."""
    try:
        return float32_matmul_precision()
    except RuntimeError:
        # Set by the newer interface, after which the older one raises.
        places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
        kinds = {getattr(place, "fp32_precision", "ieee") for place in places}
        return "high" if kinds & {"tf32", "bf16"} else "highest"


@contextmanager
def settings(determinism: bool, precision: str | None = None) -> Iterator[None]:
    """Inside, as where a problem with these is called: `deterministic()` and, unless None, `matmul_precision()`.

    In other threads, too: PyTorch's settings belong to the process.
    """
    warned, warns, multiplied = deterministic_or_warning(), only_warning(), matmul_precision()
    if determinism != deterministic():
        torch.use_deterministic_algorithms(determinism)
    if precision not in (None, multiplied):
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(warned, warn_only=warns)
        if precision not in (None, multiplied):
            torch.set_float32_matmul_precision(multiplied)
