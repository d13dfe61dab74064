"""Step `decisions`: trials of problems from a few tokens to 256K, with the rates of all candidates, and a profile.

The profile, `<silicon>.json` in the folder of results, is what `attn-dispatch profile --share` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attn_dispatch import profile
from attn_dispatch.backends import native
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.bundle import shareable, write_bundle
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.example import make
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup
from tools.lib.tables import Table

LONGNET = Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True)
CAUSAL = Dense(is_causal=True)
#: Shape [batch, len, heads, head_dim], pattern and dtype of each, the most wanted first.
PROBLEMS: dict[str, tuple[tuple[int, int, int, int], Pattern, str]] = {
    "causal hd128 4k": ((1, 4096, 16, 128), CAUSAL, "bfloat16"),
    "longnet 16k": ((1, 16_384, 16, 64), LONGNET, "bfloat16"),
    "causal hd64 4k": ((1, 4096, 16, 64), CAUSAL, "bfloat16"),
    "neighborhood 2-D": ((1, 4096, 16, 64), Neighborhood((64, 64), (13, 13)), "bfloat16"),
    "longnet 64k": ((1, 65_536, 8, 128), LONGNET, "bfloat16"),
    "window 16k": ((1, 16_384, 16, 64), Window(1023, 0), "bfloat16"),
    "one token": ((1, 1, 32, 128), Dense(), "bfloat16"),
    "small batch": ((4, 512, 16, 64), Dense(), "bfloat16"),
    "causal hd128 16k": ((1, 16_384, 16, 128), CAUSAL, "bfloat16"),
    "neighborhood 3-D": ((1, 4096, 16, 64), Neighborhood((16, 16, 16), (5, 5, 5)), "bfloat16"),
    "float32 4k": ((1, 4096, 16, 64), CAUSAL, "float32"),
    "longnet 256k": ((1, 262_144, 8, 64), LONGNET, "bfloat16"),
    "causal hd64 16k": ((1, 16_384, 16, 64), CAUSAL, "bfloat16"),
}
WITHOUT_BACKWARD = ("one token",)
DRY_PROBLEMS: dict[str, tuple[tuple[int, int, int, int], Pattern, str]] = {
    "causal": ((1, 32, 2, 16), CAUSAL, "float32"),
    "longnet": ((1, 64, 2, 16), Dilated((16, 32), (1, 2)), "float32"),
}
BUDGET_S, DRY_BUDGET_S = 2.8, 0.3  #: of one trial
MOST_S = 60.0  #: of one trial, which compiles outside of its budget: then it is ended
COMPILING = ("triton", "triton_tiles")  #: others compile for longer than a trial may take
COMPILES = 0.3  #: the part of the step's time in which they compile


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number > 1:
        return None
    items = [
        {"problem": name, "backward": backward, "budget_s": DRY_BUDGET_S if setup.dry_run else BUDGET_S}
        for name in (DRY_PROBLEMS if setup.dry_run else PROBLEMS)
        for backward in (False, True)
        if not (backward and name in WITHOUT_BACKWARD)
    ][: 3 if setup.dry_run else None]
    if number == 1:
        return Phase([items], item_s=MOST_S)
    # Compiled first, several at a time: what compilers keep on disk is then there for the trials.
    builds = [[{**item, "backend": name} for name in COMPILING] for item in items]
    return Phase(builds, setup.cores, COMPILES, MOST_S)


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    shape, pattern, dtype = (DRY_PROBLEMS if setup.dry_run else PROBLEMS)[item["problem"]]
    problem = problem_of(shape, pattern, getattr(torch, dtype), machine.device, backward=item["backward"])
    if "backend" in item:
        backend = registry.load(item["backend"])
        if refusals := backend.refusals(problem):
            return {"refused": "; ".join(map(str, refusals))}
        make(problem, on_device=True).call(backend)()
        machine.synchronize()
        return {"compiled": True}
    (found,) = (each.to_dict() for each in profile([problem], budget_s=item["budget_s"], progress=False))
    _share(Path(setup.output), machine.device)
    return {"tflops": rates(problem, found), "decision": found}


def rates(problem: Problem, found: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s of every timed candidate, by the arithmetic of the pattern: computing more pairs does not raise it."""
    work = native.flops(problem)
    timed = [one for one in found["candidates"] if one["median_ms"]]
    return {f"{one['backend']} {one['order']}": work / one["median_ms"] / 1e9 for one in timed}


def _share(folder: Path, device: torch.device) -> None:
    """Write the decisions up to now: a run may be ended at any time."""
    where = silicon(device)
    decisions = [decision for _, decision in Store(cache_folder()).all() if decision.silicon == where]
    shared, _ = shareable(decisions, (*registry.BUILT_IN, registry.LAST_RESORT))
    (folder / f"{where}.json").write_bytes(write_bundle(shared))


def label(item: Item) -> str:
    built = f" {item['backend']}" if "backend" in item else ""
    return f"{item['problem']} {'forward + backward' if item['backward'] else 'forward'}{built}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By problem: the choice, and its TFLOP/s."""
    found = {}
    for row in rows:
        if "decision" in row:
            chosen = f"{row['decision']['choice']} {row['decision']['order']}"
            rate = row["tflops"].get(chosen)
            found[label(row)] = chosen + ("" if rate is None else f" {rate:.1f} TFLOP/s")
    return found


SHOWN = ("sdpa", "sdpa_cudnn", "sdpa_efficient", "triton", "triton_tiles")


def tables(found: Any) -> Iterator[Table]:
    yield Table(
        ("problem", *(f"`{name}`" for name in SHOWN)),
        [(label(row), *(_cell(row["decision"], name) for name in SHOWN)) for row in found["rows"] if "decision" in row],
        "Milliseconds of a call by `profile`, the longer of the device's and the host's time; the choice in bold. "
        f"No time was left for {found['summary']['left_out']} problems.",
    )


def _cell(decision: Any, name: str) -> str:
    timed = [row["median_ms"] for row in decision["candidates"] if row["backend"] == name and row.get("median_ms")]
    if not timed:
        return "-"
    return f"**{min(timed):.2f}**" if decision["choice"] == name else f"{min(timed):.2f}"
