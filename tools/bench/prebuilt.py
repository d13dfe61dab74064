"""The native kernel's libraries of a wheel against the one compiled for this very processor, interleaved.

    python -m tools.bench.prebuilt

Batch 1, 8 heads of 64, all threads. Every result is checked against float64 before it is timed.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library
from attn_dispatch.kernels.native.variants import VARIANTS, build
from attn_dispatch.machine.compiler import compiler
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import parser, ratio, timing, write

HERE = "here"  #: the library compiled for this processor
ROUNDS = 31
TOKENS = 2048
PATTERNS: tuple[Pattern, ...] = (
    Dense(is_causal=True),
    Window(256, 0),
    Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True),
)
DTYPES = (torch.float32, torch.bfloat16)


def libraries(folder: Path) -> dict[str, ctypes.CDLL]:
    """Those of a wheel that this processor can run, and the one compiled for it."""
    options = {each.name: each.options for each in VARIANTS if each.needs <= library.cpu_flags()}
    found = {}
    for name, given in {HERE: library.OPTIONS, **options}.items():
        build(compiler().command, given, folder / f"{name}.so")
        found[name] = ctypes.CDLL(str(folder / f"{name}.so"))
    return found


def use(loaded: ctypes.CDLL) -> None:
    """Let the backend run a library from now on."""
    library.load = lambda: loaded


def call_by(loaded: ctypes.CDLL, example: Example) -> Callable[[], object]:
    use(loaded)
    call = example.call(registry.load("native"))

    def by_library() -> object:
        use(loaded)
        return call()

    return by_library


def compared(pattern: Pattern, dtype: torch.dtype, backward: bool, loaded: dict[str, ctypes.CDLL]) -> dict[str, Any]:
    """Times by each library, and their paired ratios over the one compiled here.

    Raises:
        RuntimeError: a result is wrong.
    """
    example = make(problem_of((1, TOKENS, 8, 64), pattern, dtype, torch.device("cpu"), backward=backward))
    expected = Oracle.of(example)
    for name, each in loaded.items():
        use(each)
        failures = expected.check(expected.run(registry.load("native"))).failures
        if failures:
            raise RuntimeError(f"{name}, {pattern}: {'; '.join(failures)}")
    calls = {name: call_by(each, example) for name, each in loaded.items()}
    turns = time_in_rounds(calls, budget_s=None, min_rounds=ROUNDS, max_rounds=ROUNDS, hopeless=None).timings
    entry = {
        "pattern": str(pattern),
        "dtype": str(dtype).removeprefix("torch."),
        "backward": backward,
        "times": {name: timing(one) for name, one in turns.items()},
        "over_here": {name: ratio(turns[name], turns[HERE]) for name in loaded if name != HERE},
    }
    print(entry, flush=True)
    return entry


def main() -> None:
    options = parser(__doc__, "prebuilt.json").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = libraries(Path(folder))
        rows = [compared(p, dtype, back, loaded) for p in PATTERNS for dtype in DTYPES for back in (False, True)]
    program = Path(compiler().program).name
    write(options.output, {"compiler": program, "tokens": TOKENS, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
