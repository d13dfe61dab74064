"""What Triton's kernels are compiled to for GPUs that are not there, as the compiler itself reports. Nothing is timed.

    python -m tools.bench.kernels_compiled

For each capability, dtype and head_dim the preferred blocks of `triton`: registers and bytes of stack of a thread,
which are what it spills, and shared memory. Each launch is made as on a device, but for the last step: what a kernel is
compiled to depends on its arguments. Results of other versions of Triton in the file are kept.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from attn_dispatch.backends import triton as backend
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import BlockConfig, precision
from attn_dispatch.kernels.triton.support import TritonKernel, shared_bytes
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tools.lib.common import parser, write
from tools.lib.kernels import InPlace
from tools.lib.tables import Table

TAKES = "10 min"
KERNELS = (backend.FORWARD, backend.BACKWARD_Q, backend.BACKWARD_KV)
CUDA = torch.device("cuda", 0)
LENGTH, HEADS = 512, 2  #: what a kernel is compiled to does not depend on them
#: dtype, and torch.set_float32_matmul_precision, of the float32 products.
KINDS = (("bfloat16", "highest"), ("float16", "highest"), ("float32", "highest"), ("float32", "high"))
HEAD_DIMS = (64, 128, 256)
SUMS, SUM_CAPABILITIES = (80, 96, 160, 192), (80, 90, 120)  #: sums of two powers of two

#: Bytes of shared memory for a block, by capability. Source: CUDA C++ Programming Guide, technical specifications.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
Item = dict[str, Any]
TENSOR_MEMORY = 512  #: columns of 10.0


@dataclass(frozen=True)
class Compiled:
    """A kernel in one block, and what the compiler made of it; the block was found to fit by `estimated_bytes`."""

    block: BlockConfig
    precision: str
    estimated_bytes: int
    made: Any  #: Triton's compiled kernel

    def fits(self, capability: int) -> bool:
        """Whether a launch would find the shared and, on 10.0, the tensor memory that the kernel needs."""
        tensor_memory = getattr(self.made.metadata, "tmem_size", 0) or 0
        return self.made.metadata.shared <= SHARED_LIMIT[capability] and tensor_memory <= TENSOR_MEMORY


class _Unlaunched(InPlace):
    """Compiles what would be launched."""

    def start(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if self.wanted:
            self.made = self.kernel.load().warmup(*arguments, grid=grid, **constants)


@contextmanager
def gpu(capability: int) -> Iterator[None]:
    """Inside, this process's GPU has a compute capability, such as 90 for 9.0; to Triton's compiler also afterwards."""
    active: Any = importlib.import_module("triton.runtime.driver").driver
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    view = {"get_current_target": lambda: target, "get_current_stream": lambda device: 0}
    # Triton keeps a table of kernels for each device.
    active.set_active(SimpleNamespace(**view, get_current_device=lambda: capability))
    properties = SimpleNamespace(
        shared_memory_per_block_optin=SHARED_LIMIT[capability], L2_cache_size=40 << 20, multi_processor_count=108
    )
    with (
        patch("torch.cuda.get_device_capability", lambda device=None: divmod(capability, 10)),
        patch("torch.cuda.get_device_properties", lambda device=None: properties),
    ):
        backend.block_configs.cache_clear()
        yield


def compiled(each: TritonKernel, problem: Problem, block: BlockConfig) -> Compiled:
    """A kernel for the capability of `gpu`. The problem: on a CPU, with gradients, lengths a multiple of 16."""
    there = replace(problem, device=CUDA)
    kernels = {kernel.kernel: _Unlaunched(kernel, kernel is each) for kernel in KERNELS}
    used = precision(there)
    q, k, v = (torch.empty(1, problem.q_len, problem.heads, problem.head_dim, dtype=problem.dtype) for _ in range(3))
    stand_ins: dict[str, Any] = {name.upper(): kernel for name, kernel in kernels.items()}
    stand_ins["KERNELS"] = tuple(kernels.values())
    with (
        patch.multiple(backend, **stand_ins),
        patch.multiple(backend, block_configs=lambda *_: (block,)),
        patch.multiple(support, precision=lambda _: used),
    ):
        call = backend.partial(problem)
        out, lse = call.forward(q, k, v)
        if each is not backend.FORWARD:
            call.backward(out, None, (q, k, v, out, lse))
        backend.forget(problem)
    made = kernels[each.kernel].made
    return Compiled(block, used, shared_bytes(each, there, block), made)


def preferred(each: TritonKernel, problem: Problem, capability: int) -> tuple[Compiled, list[BlockConfig]]:
    """The kernel in the first of its blocks that fits, as `support.launch` finds it, and the blocks before that one."""
    blocks = backend.block_configs(each, replace(problem, device=CUDA))
    too_large: list[BlockConfig] = []
    for block in blocks[:-1]:
        found = compiled(each, problem, block)
        if found.fits(capability):
            return found, too_large
        too_large.append(block)
    return compiled(each, problem, blocks[-1]), too_large


# --- items ------------------------------------------------------------------------------------------------------------


def items(capabilities: Sequence[int]) -> list[Item]:
    """A kernel for each."""
    every: list[tuple[int, int, tuple[str, str], TritonKernel]] = [*product(capabilities, HEAD_DIMS, KINDS, KERNELS)]
    every += product([each for each in capabilities if each in SUM_CAPABILITIES], SUMS, KINDS[::2], KERNELS)
    return [
        {"capability": capability, "kernel": each.kernel, "head_dim": head_dim, "dtype": dtype, "precision": precision}
        for capability, head_dim, (dtype, precision), each in every
        if dtype != "float16" or head_dim < HEAD_DIMS[-1]
    ]


def row_of(item: Item) -> Item:
    warnings.simplefilter("ignore")  # of Triton's compiler, about itself
    (each,) = (kernel for kernel in KERNELS if kernel.kernel == item["kernel"])
    shape, dtype = (1, LENGTH, HEADS, item["head_dim"]), getattr(torch, item["dtype"])
    problem = problem_of(shape, Dense(is_causal=True), dtype, torch.device("cpu"), backward=True)
    with gpu(item["capability"]):
        found, too_large = preferred(each, replace(problem, matmul_precision=item["precision"]), item["capability"])
    registers, stack_bytes = usage(found.made.asm["cubin"])
    return {
        **item,
        "precision": found.precision if item["dtype"] == "float32" else None,
        "block": astuple(found.block),
        "too_large": [astuple(one) for one in too_large],
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": found.made.metadata.shared,
        "estimated_bytes": found.estimated_bytes,
    }


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as NVIDIA's assembler reports them."""
    folder = Path(importlib.import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers: {text[:200]}")
    return int(found[1]), int(found[2])


def tables(found: Any) -> Iterator[Table]:
    version = max(found["versions"], key=lambda each: tuple(map(int, each.split("."))))
    rows = [row for row in found["versions"][version]["rows"] if row["dtype"] == "bfloat16"]
    there = sorted({row["capability"] for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        if row["head_dim"] in HEAD_DIMS:
            lines.setdefault((f"`{row['kernel']}`", str(row["head_dim"])), {})[row["capability"]] = _cell(row)
    yield Table(
        ("kernel", "head_dim", *(f"{each // 10}.{each % 10}" for each in there)),
        [(*line, *(cells.get(each, "-") for each in there)) for line, cells in lines.items()],
        f"With Triton {version}, for CUDA capabilities 8.0 to 12.0, causal, bfloat16: the block that a launch "
        "takes (rows x columns, warps, stages), registers of a thread, and the bytes that it spills. The file "
        "has other dtypes.",
    )


def _cell(row: Item) -> str:
    block = "{} x {}, {}, {}".format(*row["block"])
    return f"{block}: {row['registers']}" + (f"; {row['stack_bytes']} B" if row["stack_bytes"] else "")


def main() -> None:
    given = parser(__doc__, "kernels_compiled.json").parse_args()
    with multiprocessing.get_context("spawn").Pool() as pool:
        rows = pool.map(row_of, items(tuple(SHARED_LIMIT)), chunksize=1)
    known = json.loads(given.output.read_text())["versions"] if given.output.exists() else {}
    versions = {**known, metadata.version("triton"): {"kernels": support.version(), "rows": rows}}
    write(given, {"versions": versions}, tables)


if __name__ == "__main__":
    main()
