"""What Triton's kernels are compiled to for GPUs that are not there, and the bounds that this sets. Nothing is timed.

    python -m tools.bench.kernels_compiled [--capabilities 80 90] [--dtypes bfloat16] [--processes 2]

For each capability, dtype and head_dim the preferred blocks of `triton`, compiled by the backend's own launches:
registers, spills, shared memory, instructions of a pass of the main loop, and how much of the peak rate of products
each unit of a multiprocessor leaves. Beside them the blocks that an H100 timed (tools/results/gpu/blocks.json). Results
of other versions of Triton in the file are kept.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Sequence
from dataclasses import astuple, replace
from importlib import metadata
from itertools import product
from typing import Any

import torch

from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import BlockConfig
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tools.lib.common import RESULTS, parser, write
from tools.lib.compiled_kernels import CAPABILITIES, KERNELS, compiled, examined, gpu, preferred
from tools.lib.makespan import schedules

TAKES = "15 min"
TIMED = RESULTS / "gpu" / "blocks.json"
LENGTH, HEADS = 512, 2  #: what a kernel is compiled to does not depend on them
#: dtype, and torch.set_float32_matmul_precision, of the float32 products.
KINDS = (("bfloat16", "highest"), ("float16", "highest"), ("float32", "highest"), ("float32", "high"))
DTYPES = tuple(dict.fromkeys(dtype for dtype, _ in KINDS))
HEAD_DIMS = (64, 128, 256)
#: Sums of two powers of two, and where those are compiled, for the first and the third of KINDS.
SUMS = (80, 96, 160, 192)
SUM_CAPABILITIES = (80, 90, 120)

Item = dict[str, Any]


def items(capabilities: Sequence[int], dtypes: Sequence[str] = DTYPES) -> list[Item]:
    """A kernel for each: those with a `block` in that one, the others in the one that a launch would take."""
    found: list[Item] = [
        {"capability": capability, "kernel": each.kernel, "head_dim": head_dim, "dtype": dtype, "precision": precision}
        for capability, head_dim, (dtype, precision), each in product(capabilities, HEAD_DIMS, KINDS, KERNELS)
        if dtype in dtypes and (dtype != "float16" or head_dim < HEAD_DIMS[-1])
    ]
    found += [
        {"capability": capability, "kernel": each.kernel, "head_dim": head_dim, "dtype": dtype, "precision": precision}
        for capability, head_dim, (dtype, precision), each in product(capabilities, SUMS, KINDS[::2], KERNELS)
        if dtype in dtypes and capability in SUM_CAPABILITIES
    ]
    half = {"capability": 90, "dtype": "bfloat16", "precision": "highest"}
    return found + [{**half, **one} for one in timed_blocks() if 90 in capabilities]


def timed_blocks() -> list[Item]:
    """The kernels that an H100 timed in bfloat16 on causal attention, with their share of the matrix products' rate."""
    limit = json.loads((TIMED.parent / "device.json").read_text())["summary"]["bfloat16 TFLOP/s"]
    wanted = {"stage": "time", "backend": "triton", "pattern": "causal", "dtype": "bfloat16"}
    rows = [row for row in json.loads(TIMED.read_text())["rows"] if wanted.items() <= row.items() and row.get("tflops")]
    names = ("kernel", "head_dim", "block")
    return [{**{name: row[name] for name in names}, "share": row["tflops"] / limit} for row in rows]


def problem(item: Item) -> Problem:
    shape = (1, LENGTH, HEADS, item["head_dim"])
    found = problem_of(shape, Dense(is_causal=True), getattr(torch, item["dtype"]), torch.device("cpu"), backward=True)
    return replace(found, matmul_precision=item["precision"])


def row_of(item: Item) -> Item:
    warnings.simplefilter("ignore")  # of Triton's compiler, about itself
    (each,) = (kernel for kernel in KERNELS if kernel.kernel == item["kernel"])
    with gpu(item["capability"]):
        if "block" in item:
            found, too_large = compiled(each, problem(item), BlockConfig(*item["block"])), list[BlockConfig]()
        else:
            found, too_large = preferred(each, problem(item), item["capability"])
        row = examined(found, problem(item), item["capability"])
    single = {"precision": found.precision if item["dtype"] == "float32" else None}
    return {**item, **single, "block": astuple(found.block), "too_large": [astuple(one) for one in too_large], **row}


def line(row: Item) -> str:
    bounds = "  ".join(f"{name} {share:.2f}" for name, share in row["bounds"].items())
    what = f"{row['capability']} {row['kernel']} {row['precision'] or row['dtype']} hd{row['head_dim']} {row['block']}"
    return f"{what}: {row['registers']} registers, {row['local_instructions']} local instructions; {bounds}"


def main() -> None:
    options = parser(__doc__, "kernels_compiled.json")
    options.add_argument("--capabilities", nargs="+", type=int, default=list(CAPABILITIES), choices=CAPABILITIES)
    options.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    options.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = options.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for row in pool.imap(row_of, items(arguments.capabilities, arguments.dtypes)):
            print(line(row), flush=True)
            rows.append(row)
    known = json.loads(arguments.output.read_text())["versions"] if arguments.output.exists() else {}
    version = metadata.version("triton")
    versions = {**known, version: {"kernels": support.version(), "rows": rows}}
    write(arguments.output, {"versions": versions, "schedule": schedules()})


if __name__ == "__main__":
    main()
