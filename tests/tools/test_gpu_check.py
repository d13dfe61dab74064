"""`tools.checks.gpu_check`: crashes and hangs, how time is divided, what is ranked; a run without a GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attn_dispatch.machine.hardware import silicon
from tests.support.processes import printed
from tools.checks import gpu_check
from tools.checks.gpu import decisions, graphs, workers
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup

DRY = Setup("", True, 2)

#: Stands for a worker: an item says what becomes of the process that measures it.
CHILD = """
import json, os, signal, sys
for item in json.load(sys.stdin):
    if item["does"] == "crash":
        print("lost", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    while item["does"] == "hang":
        signal.pause()
    print(json.dumps({"process": os.getpid()}), flush=True)
sys.exit(3 if item["does"] == "fail at the end" else 0)
"""


def rows(*does: str, item_s: float = 30.0) -> list[Row]:
    items = [{"does": each} for each in does]
    command = [sys.executable, "-c", CHILD]
    return list(workers.rows_of(items, command, item_s, time.monotonic() + 60, dict(os.environ)))


def test_a_crash_costs_one_item() -> None:
    first, crashed, last = rows("work", "crash", "work")
    assert crashed == {"does": "crash", "failed": "the process ended with -11: lost"}
    assert not {"failed"} & (first.keys() | last.keys())
    assert first["process"] != last["process"]


def test_a_hang_costs_one_item() -> None:
    _, hung, last = rows("work", "hang", "work", item_s=0.1)
    assert hung == {"does": "hang", "failed": "no result within 0 s"}
    assert "failed" not in last


# --- the run ----------------------------------------------------------------------------------------------------------


def test_every_item_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Row]] = []

    def rows_of(items: list[Item], *_: object) -> Any:
        for item in items:
            yield {**item, "failed": "lost"} if item["item"] == 1 else item
            seen.append(json.loads((tmp_path / "fake.json").read_text())["rows"])

    step: Any = ModuleType("fake")
    step.phase = lambda number, rows, setup: Phase([[{"item": 0}, {"item": 1}]]) if number == 0 else None
    step.label, step.summary = (lambda item: str(item["item"])), (lambda rows: {})
    monkeypatch.setitem(sys.modules, "tools.checks.gpu.fake", step)
    monkeypatch.setattr(gpu_check, "rows_of", rows_of)
    summary = gpu_check.run_step("fake", Setup(str(tmp_path), True, 1), 60.0, {}, {"silicon": "here"})
    assert [len(each) for each in seen] == [1, 2]
    assert (summary["items"], summary["failed"], summary["left_out"]) == (2, 1, 0)
    written = json.loads((tmp_path / "fake.json").read_text())
    assert written["silicon"] == "here"
    assert written["summary"] == summary
    again = gpu_check.run_step("fake", Setup(str(tmp_path), True, 1), 60.0, {}, {}, resume=True)
    assert (len(seen), again["items"], again["failed"], again["left_out"]) == (3, 2, 1, 0)  # what failed, once more


def test_a_dry_run_leaves_the_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert gpu_check.parse([]).output == gpu_check.RESULTS
    assert gpu_check.parse(["--dry-run"]).output.parent == tmp_path


def test_no_result_replaces_that_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = json.loads((gpu_check.RESULTS / "device.json").read_text())["silicon"]
    gpu_check.refuse_other_machines(gpu_check.RESULTS, list(gpu_check.STEPS), there)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--output", str(gpu_check.RESULTS)])
    monkeypatch.setattr(gpu_check, "run_step", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match=f"device.json holds results of {there}, not of {silicon('cpu')}: nothing"):
        gpu_check.main()


# --- the steps --------------------------------------------------------------------------------------------------------


def test_a_graph_that_keeps_old_inputs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    item = {"kind": "capture", "backend": "manual", "case": "dense"}
    assert graphs.measure(item, machine, DRY)["equal"]
    monkeypatch.setattr(machine, "captured", lambda call: (call(), lambda: None), raising=False)
    assert "differs" in graphs.measure(item, machine, DRY)["failed"]


def test_decisions_write_a_profile(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path), True, 2)
    item = {"problem": "causal", "backward": False, "budget_s": 0.05}
    row = {**item, **decisions.measure(item, Machine(), setup)}
    assert row["tflops"]
    assert list(decisions.summary([row])) == ["causal forward"]
    assert [path.suffix for path in tmp_path.glob("*.json")] == [".json"]


@pytest.mark.full
def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    """Every step, and a file of at most those that it should write."""
    printed("-m", "tools.checks.gpu_check", "--dry-run", "--output", str(tmp_path), "--minutes", "9")
    for step in gpu_check.STEPS:
        found = json.loads((tmp_path / f"{step}.json").read_text())
        assert found["rows"], step
        assert found["summary"]["left_out"] == 0, step
    assert len(list(tmp_path.iterdir())) == len(gpu_check.STEPS) + 1
