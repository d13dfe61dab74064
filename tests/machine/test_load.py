"""Whether other programs take the cores: while something is measured, and now."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_dispatch.machine import load
from attn_dispatch.machine.load import Load

IS_CALM = load.is_calm  # as it is before a fixture of all tests fixes its answer


@pytest.mark.parametrize(
    ("cpu_s", "switches", "disturbed"),
    [(0.001, 0, False), (0.001, 4, False), (0.001, 5, True), (1.0, 20, False), (1.0, 135, True), (10.0, 300, False)],
)
def test_a_measurement_is_disturbed_by_switches_beyond_those_of_a_quiet_machine(
    cpu_s: float, switches: int, disturbed: bool
) -> None:
    assert Load(cpu_s, cpu_s, switches).disturbed == disturbed


@pytest.mark.parametrize(("pressure", "calm"), [("0.00", True), ("9.99", True), ("10.00", False), ("84.20", False)])
def test_a_machine_is_calm_while_hardly_any_task_waits_for_a_core(pressure: str, calm: bool, tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    text = f"some avg10={pressure} avg60=50.00 avg300=7.18 total=14\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
    (tmp_path / "pressure" / "cpu").write_text(text)
    assert IS_CALM(tmp_path) == calm


@pytest.mark.parametrize(("average", "calm"), [(0.2, True), (1000.0, False)])
def test_without_pressure_the_load_average_counts(
    average: float, calm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (average, 0.0, 0.0))
    assert IS_CALM(tmp_path) == calm
