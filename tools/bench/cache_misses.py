"""Cache misses of the native kernel with and without Hilbert order, counted by valgrind's cache simulation.

    python -m tools.bench.cache_misses [tokens ...]

A 13 x 13 neighbourhood on a square grid, one head of 64 of four that lie in memory, float32, forward. What the program
does besides is counted by itself and taken away. Times mean nothing under a simulator, and none is given.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.native.steps import native_tables
from attn_dispatch.kernels.native.variants import SOURCE
from attn_dispatch.machine.compiler import compiler
from attn_dispatch.spec.orders import HILBERT, NATURAL
from attn_dispatch.spec.pattern import Neighborhood
from attn_dispatch.spec.problem import Problem
from tools.lib.common import parser, write

HEADS, HEAD_DIM, WINDOW = 4, 64, 13
L1, L2 = 32768, 1 << 20  #: bytes per core
WAYS, LINE = 8, 64
#: valgrind supports no wider vectors, and takes nine times as long with multiply-adds, for the same misses.
FLAGS = ("-O2", "-std=c++17", "-mavx2", "-mf16c", "-fno-math-errno")
COUNTS = {"l1_misses": "D1  misses", "l2_misses": "LLd misses", "accesses": "D   refs"}


def compiled(folder: Path) -> Path:
    program = folder / "cache_misses"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([*compiler().command, *FLAGS, f"-I{SOURCE.parent}", str(source), "-o", str(program)], check=True)
    return program


def problem_of(tokens: int) -> Problem:
    side = math.isqrt(tokens)
    q = torch.empty(1, side * side, 1, HEAD_DIM, device="meta")
    return Problem.of(q, q, q, Neighborhood((side, side), (WINDOW,)), device="cpu")


def dump(problem: Problem, order: str, path: Path) -> None:
    tables = native_tables(problem, order)
    sizes = torch.tensor([problem.q_len, HEADS, HEAD_DIM])
    arrays: list[tuple[Tensor | None, int]] = [
        (sizes, 1), (tables.tiles, 5), (tables.runs, 5), (tables.order, 1), (tables.listed, 1), (tables.lanes, 1)
    ]  # fmt: skip
    with path.open("wb") as file:
        for array, width in arrays:
            assert array is not None
            file.write(torch.tensor(array.numel() // width).numpy().tobytes() + array.contiguous().numpy().tobytes())


def simulated(program: Path, data: Path, works: bool) -> dict[str, int]:
    caches = [f"--{name}={size},{ways},{LINE}" for name, size, ways in (("D1", L1, WAYS), ("LL", L2, WAYS))]
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", *caches]
    done = subprocess.run(
        [*command, str(program), str(data), str(int(works))], capture_output=True, text=True, check=True
    )
    text = done.stderr.replace(",", "")
    found = {}
    for name, label in COUNTS.items():
        match = re.search(label.replace(" ", r"\s+") + r":\s+(\d+)", text)
        assert match is not None, text
        found[name] = int(match[1])
    return found


def misses(program: Path, problem: Problem, order: str, data: Path) -> dict[str, Any]:
    dump(problem, order, data)
    with_it, without = simulated(program, data, True), simulated(program, data, False)
    tables = native_tables(problem, order)
    assert tables.listed is not None
    return {
        **{name: with_it[name] - without[name] for name in with_it},
        "keys_per_tile": len(tables.listed) / len(tables.tiles),
        # K and V of every key listed by a tile.
        "lines_per_tile": 2 * len(tables.listed) / len(tables.tiles) * HEAD_DIM * 4 // LINE,
    }


def main() -> None:
    arguments = parser(__doc__, "cache_misses.json")
    arguments.add_argument("tokens", nargs="*", type=int, default=[4096, 16384, 65536])
    options = arguments.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    found = []
    with tempfile.TemporaryDirectory() as name:
        program = compiled(Path(name))
        for tokens in options.tokens:
            by_order = {o: misses(program, problem_of(tokens), o, Path(name) / "tables") for o in (NATURAL, HILBERT)}
            fewer = {n: 1 - by_order[HILBERT][n] / by_order[NATURAL][n] for n in by_order[NATURAL]}
            found.append({"tokens": tokens, **by_order, "fewer": fewer})
            print(found[-1])
    write(options.output, {"l1_bytes": L1, "l2_bytes": L2, "window": WINDOW, "rows": found})


if __name__ == "__main__":
    main()
