"""The package flash-attn 4: how it is installed and loaded, and what its general kernels take; lists of blocks.

Source: flash-attn-4 4.0.0b36, flash_attn/cute/interface.py and block_sparsity.py.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.branches.backend import Package
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.device_cache import derived_on
from attn_dispatch.kernels.limits import ANY, HALF, LARGEST_GRID, Limits, capability
from attn_dispatch.machine import code_folder
from attn_dispatch.spec.data import BlocksForm
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem

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


# --- blocks: each tile of queries has a list of the key tiles that all its queries see -----------------------------

TILE = 128  #: queries, and keys


def queries_together(device: torch.device) -> int:
    """That share a list: two tiles on Blackwell, where a program computes two."""
    return TILE * (2 if (capability(device) or ANY) >= (10, 0) else 1)


def refuse_blocks(problem: Problem) -> list[Refusal]:
    """Why lists of tiles cannot say which keys are seen, or kernels take none."""
    form = problem.pattern
    if not isinstance(form, BlocksForm):
        return []
    found = [Refusal("gradient", "computes blocks without gradients")] if problem.needs_grad else []
    if form.is_list:
        found.append(Refusal("pattern", "takes tables of blocks, not lists, in which a block may stand twice"))
    if form.within != Dense():
        found.append(Refusal("pattern", f"takes blocks alone, not within {form.within}"))
    (qb, kb), queries = form.size, queries_together(problem.device)
    if qb % queries or kb % TILE:
        found.append(Refusal("pattern", f"needs blocks of {queries} x {TILE} or multiples, not {qb} x {kb}"))
    return found


def block_list_bytes(problem: Problem) -> int:
    """Upper bound of the bytes of `block_lists` and of making them."""
    form = problem.pattern
    if not isinstance(form, BlocksForm):
        return 0
    tiles = -(-problem.q_len // form.size[0]) * (-(-problem.k_len // TILE) + form.size[1] // TILE)
    return 32 * problem.batch * problem.heads * tiles


def block_lists(problem: Problem, data: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each block of queries sees, and their numbers, ascending: int32 [1 or batch, 1 or heads,
    q blocks], and [.., most]. Only the last tile of a list is cut at the last key.
    """
    form, heads, tiles = problem.pattern, problem.heads, -(-problem.k_len // TILE)
    assert isinstance(form, BlocksForm)

    def make(data: Tensor) -> tuple[Tensor, Tensor]:
        seen = data.repeat_interleave(form.size[1] // TILE, 3)[..., :tiles]
        seen = seen if seen.shape[1] == 1 else seen.repeat_interleave(heads // seen.shape[1], 1)
        count, number = seen.sum(3, dtype=torch.int32), seen.logical_not().byte().argsort(dim=3, stable=True)
        return count, number[..., : max(1, int(count.max()))].int().contiguous()

    return derived_on(problem.device, data, ("flash 4", form.size, heads, tiles), make)


PACKAGE = Package(
    "flash-attn-4", hint(torch.version.cuda), "flash_attn.cute.interface", (4,), environment=compile_cache
)
