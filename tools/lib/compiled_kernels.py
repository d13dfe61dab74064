"""Triton's kernels compiled for a GPU that is not there: by the backends' own launches, on a CPU's tensors.

What a kernel is compiled to depends on its arguments: strides of one, multiples of 16, masks. So each launch is made as
on a device, but for the last step. Launch nothing in the same process: it belongs to a made-up GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from attn_dispatch.backends import triton as backend
from attn_dispatch.kernels.triton import blocks as triton_blocks
from attn_dispatch.kernels.triton.blocks import BlockConfig, parts_of, precision
from attn_dispatch.kernels.triton.support import TritonKernel, shared_bytes
from attn_dispatch.spec.problem import Problem
from tools.lib import machine_code
from tools.lib.machine_code import LOCAL, RATES, TENSOR, Loop

KERNELS = (backend.FORWARD, backend.BACKWARD_Q, backend.BACKWARD_KV)
CUDA = torch.device("cuda", 0)

#: Bytes of shared memory for a block, by capability. Source: CUDA C++ Programming Guide, technical specifications.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
CAPABILITIES = tuple(SHARED_LIMIT)
TENSOR_MEMORY = 512  #: columns


@dataclass(frozen=True)
class Compiled:
    """A kernel in one block, and what the compiler made of it.

    Args:
        shared_bytes: of a program. estimated_bytes: by which the block was found to fit.
        made: Triton's compiled kernel.
    """

    kernel: TritonKernel
    block: BlockConfig
    precision: str
    shared_bytes: int
    estimated_bytes: int
    made: Any

    @property
    def cubin(self) -> bytes:
        found: bytes = self.made.asm["cubin"]
        return found


class _Unlaunched:
    """Stands for a `TritonKernel`: compiles what would be launched."""

    def __init__(self, kernel: TritonKernel, compiles: bool) -> None:
        self._kernel, self._compiles = kernel, compiles
        self.made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def load(self) -> _Unlaunched:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            if self._compiles:
                self.made = self._kernel.load().warmup(*arguments, grid=grid, **constants)

        return launch


class _Driver:
    """Triton's view of a GPU, as far as its compiler asks."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps a table of kernels for each

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def gpu(capability: int) -> Iterator[None]:
    """Inside, this process's GPU has a compute capability, such as 90 for 9.0; to Triton's compiler also afterwards."""
    active: Any = importlib.import_module("triton.runtime.driver").driver
    active.set_active(_Driver(capability))
    properties = SimpleNamespace(
        shared_memory_per_block_optin=SHARED_LIMIT[capability], L2_cache_size=40 << 20, multi_processor_count=108
    )
    with (
        patch("torch.cuda.get_device_capability", lambda device=None: divmod(capability, 10)),
        patch("torch.cuda.get_device_properties", lambda device=None: properties),
        patch.object(triton_blocks, "winner_of", lambda *_: None),  # of a race on this machine
    ):
        backend.block_configs.cache_clear()
        yield


def compiled(each: TritonKernel, problem: Problem, block: BlockConfig | None = None) -> Compiled:
    """A kernel, in its preferred block by default, for the capability of `gpu`.

    Args:
        problem: on a CPU, with gradients; it should be small, and its lengths multiples of 16.
    """
    there = replace(problem, device=CUDA)
    block = backend.block_configs(each, there)[0] if block is None else block
    kernels = {kernel.kernel: _Unlaunched(kernel, kernel is each) for kernel in KERNELS}
    used = precision(there)
    q, k, v = (torch.empty(problem.batch, n, h, problem.head_dim, dtype=problem.dtype) for n, h in _shapes(problem))
    stand_ins: dict[str, Any] = {name.upper(): kernel for name, kernel in kernels.items()}
    with (
        patch.multiple(backend, **stand_ins),
        patch.multiple(backend, block_configs=lambda *_: (block,), precision=lambda _: used),
    ):
        call = backend.partial(problem)
        out, lse = call.forward(q, k, v)
        if each is not backend.FORWARD:
            call.backward(out, None, (q, k, v, out, lse))
        backend.forget(problem)
    made = kernels[each.kernel].made
    return Compiled(each, block, used, made.metadata.shared, shared_bytes(each, there, block), made)


def fits(each: Compiled, capability: int) -> bool:
    """Whether a launch would find the shared and, on 10.0, the tensor memory that the kernel needs."""
    tensor_memory = getattr(each.made.metadata, "tmem_size", 0) or 0
    return each.shared_bytes <= SHARED_LIMIT[capability] and tensor_memory <= TENSOR_MEMORY


def preferred(each: TritonKernel, problem: Problem, capability: int) -> tuple[Compiled, list[BlockConfig]]:
    """The kernel in the first of its blocks that fits, as `support.launch` finds it, and the blocks before that one."""
    blocks = backend.block_configs(each, replace(problem, device=CUDA))
    too_large: list[BlockConfig] = []
    for block in blocks[:-1]:
        found = compiled(each, problem, block)
        if fits(found, capability):
            return found, too_large
        too_large.append(block)
    return compiled(each, problem, blocks[-1]), too_large


def _shapes(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Length and heads of q, k and v."""
    keys = (problem.k_len, problem.kv_heads)
    return (problem.q_len, problem.heads), keys, keys


def examined(each: Compiled, problem: Problem, capability: int) -> dict[str, Any]:
    """Its resources, the main loop's instructions of a pass, and the share of peak that each unit leaves it."""
    block, used = each.block, machine_code.usage(each.cubin)
    pairs = block.rows * block.columns * sum(parts_of(problem.head_dim)) * each.kernel.products
    products = pairs * (3 if each.precision == "tf32x3" and problem.dtype == torch.float32 else 1)
    loop = machine_code.main_loop(machine_code.disassembled(each.cubin))
    rate = _rate(problem, loop, capability)
    units = machine_code.cycles(loop, block.warps) | {"tensor": max(products, loop.products(block.warps)) / rate}
    return {
        "registers": used.registers,
        "stack_bytes": used.stack_bytes,
        "shared_bytes": each.shared_bytes,
        "estimated_bytes": each.estimated_bytes,
        "instructions": len(loop.body),
        "tensor_instructions": loop.count(TENSOR),
        "local_instructions": loop.count(LOCAL),
        "bounds": {name: min(1.0, products / rate / busy) for name, busy in units.items()},
    }


def _rate(problem: Problem, loop: Loop, capability: int) -> float:
    """Multiply-adds of a cycle at the most, of the kind of products that the loop has."""
    rates = RATES[capability]
    if problem.dtype != torch.float32:
        return rates.tensor
    return rates.tensor / 2 if loop.count(TENSOR) else rates.single
