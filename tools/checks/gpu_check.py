"""All checks that need a CUDA device: conformance, timings, and a profile that can be shipped.

    python -m tools.checks.gpu_check --output FOLDER [--minutes 8]

Writes into the folder: conformance.txt (the CUDA tests), routes.json (every decision, with all candidates),
<silicon>.json (the same as a profile for profiles/), and summary.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TAKES = "8 min"  #: unless --minutes says otherwise
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


FIRST_S, LATER_S = 20.0, 3.0  #: seconds per problem; the first ones include compiling


def first_problems() -> list[Any]:
    """What the README's table needs: every backend's rate, from 4K to 1M tokens, forward and backward."""
    import torch

    from attn_dispatch import Dense, Dilated, Window
    from attn_dispatch.spec.shapes import problem_of

    device = torch.device("cuda", 0)
    longnet = Dilated((2048, 4096, 8192), (1, 2, 4), True)
    found = []
    for length in (4096, 32_768, 262_144, 1_048_576):
        for head_dim in (64, 128):
            # Dense attention at 1M tokens would take the time of everything else.
            patterns = [longnet, Window(4095, 0)] + [Dense(True)] * (length <= 32_768)
            for backward in (False, True):
                shape = (1, length, 8, head_dim)
                found += [problem_of(shape, p, torch.bfloat16, device, backward=backward) for p in patterns]
    return found


def problems() -> list[Any]:
    import torch

    from attn_dispatch import Dense, Dilated, Neighborhood, Window
    from attn_dispatch.spec.shapes import problem_of

    device = torch.device("cuda", 0)
    longnet = ((2048, 4096, 8192), (1, 2, 4))
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 128):
            for length in (1024, 4096, 16384, 65536):
                patterns = [Dense(), Dense(True), Dilated(*longnet), Dilated(*longnet, True), Window(1023, 0)]
                for backward in (False, True):
                    shape = (1, length, 8, head_dim)
                    found += [problem_of(shape, p, dtype, device, backward=backward) for p in patterns]
    grids = [Neighborhood((64, 64), (13, 13)), Neighborhood((16, 16, 16), (5, 5, 5))]
    shape = (1, 4096, 8, 64)
    return found + [
        problem_of(shape, p, torch.bfloat16, device, backward=backward) for p in grids for backward in (False, True)
    ]


def rates(problem: Any, row: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s of every timed candidate, by the arithmetic of the pattern: computing more pairs does not raise it."""
    from attn_dispatch.backends import native

    work = native.flops(problem)
    timed = {one["backend"]: one["median_ms"] for one in row["candidates"] if one["median_ms"]}
    return {name: work / median_ms / 1e9 for name, median_ms in timed.items()}


def conformance(output: Path) -> int:
    import pytest

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = pytest.main(["-m", "cuda", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")])
    (output / "conformance.txt").write_text(text.getvalue())
    print(text.getvalue()[-3000:])
    return int(code)


def measure(output: Path, seconds: float) -> dict[str, Any]:
    """Decide as many problems as the time allows, and write them as results and as a profile."""
    import torch

    from attn_dispatch import profile
    from attn_dispatch.kernels import registry
    from attn_dispatch.machine.hardware import silicon
    from attn_dispatch.settings import cache_folder
    from attn_dispatch.store.bundle import shareable, write_bundle
    from attn_dispatch.store.folder import Store

    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    planned = [(problem, FIRST_S) for problem in first_problems()] + [(problem, LATER_S) for problem in problems()]
    for problem, most_s in planned:
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            (row,) = (one.to_dict() for one in profile([problem], budget_s=min(left, most_s), progress=False))
            rows.append({**row, "tflops": rates(problem, row)} if most_s == FIRST_S else row)
        except Exception as error:  # noqa: BLE001 - a kernel that breaks the device must not lose other results
            rows.append({"problem": str(problem), "failed": f"{type(error).__name__}: {error}"})
        (output / "routes.json").write_text(json.dumps(rows, indent=1))
    where = silicon(torch.device("cuda", 0))
    decisions = [decision for _, decision in Store(cache_folder()).all() if decision.silicon == where]
    shared = shareable(decisions, (*registry.BUILT_IN, registry.LAST_RESORT)).decisions
    (output / f"{where}.json").write_bytes(write_bundle(shared))
    return {"silicon": where, "problems": len(planned), "measured": len(decisions), "rows": len(rows)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=ROOT / "tools" / "results" / "gpu")
    options.add_argument("--minutes", type=float, default=8.0)
    arguments = options.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ["ATTN_DISPATCH_CACHE_DIR"] = str(arguments.output / "cache")
    import torch

    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device: nothing was checked")
    from attn_dispatch import hardware

    print(hardware())
    start = time.monotonic()
    code = conformance(arguments.output)
    left = arguments.minutes * 60 - (time.monotonic() - start)
    summary = {"conformance_exit_code": code, "hardware": hardware().to_dict(), **measure(arguments.output, left)}
    (arguments.output / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))
    sys.exit(code)


if __name__ == "__main__":
    main()
