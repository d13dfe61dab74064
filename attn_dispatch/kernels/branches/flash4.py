"""The package flash-attn 4: how it is installed and loaded, and what its general kernels take.

Source: flash-attn-4 4.0.0b36, flash_attn/cute/interface.py.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from attn_dispatch.kernels.branches.backend import Package
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits
from attn_dispatch.machine import code_folder

COMPILE_MS = 60_000.0  #: of four or five kernels for a case
CACHE_ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  #: a variable that it reads

# Of other head_dims its backward pass gives wrong gradients, measured with 40 and 80 on an H100: flash_bwd_sm90.py has
# sums of dq for the next multiple of 16, interface.py for that of 32.
HOPPER = Limits(
    "cuda",
    dict.fromkeys(HALF, (9, 0)),
    highest=(9, 0),
    head_dim=256,
    backward_multiple=32,
    grad_lse=True,
    most_rows=LARGEST_GRID,
    platforms=("linux",),
)
BLACKWELL = HOPPER._replace(dtypes=dict.fromkeys(HALF, (10, 0)), highest=(11, 0), head_dim=128, backward_multiple=1)


def library() -> Any:
    """flash-attn 4, ready for the current device: it remembers the compute capability of the first one."""
    found = PACKAGE.load()
    if _devices_differ():
        found._get_device_arch.cache_clear()
    return found


@cache
def _devices_differ() -> bool:
    """Whether this machine has GPUs of several compute capabilities."""
    return len({torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}) > 1


def hint(cuda: str | None) -> str:
    """How to install it for PyTorch's CUDA: its compiler is that of CUDA 12 unless the extra is asked for."""
    extra = " 'flash-attn-4[cu13]'" if (cuda or "").startswith("13.") else ""
    return f"pip install 'attn-dispatch[flash4]'{extra}"


def compile_cache() -> dict[str, str]:
    """Environment variables for a cache of compiled kernels on disk, which flash-attn 4 does without by default.

    Its files are executed: they are in a folder that only this user can write to, beside the code of `native`. The
    library's own choice is a folder in /tmp with a predictable name.
    """
    if CACHE_ENABLED in os.environ:
        return {}
    folder = code_folder.writable("flash-attn-4")
    return {} if folder is None else {CACHE_ENABLED: "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder)}


PACKAGE = Package(
    "flash-attn-4", hint(torch.version.cuda), "flash_attn.cute.interface", (4,), environment=compile_cache
)
