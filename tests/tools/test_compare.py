"""`python -m tools.bench --compare`: verdicts on made-up results, and that every results file has comparable rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.lib import compare
from tools.lib.suite import RESULTS

HERE, ELSEWHERE = "cpu-one-2c-2t", "cpu-other-8c-8t"


def time(median: float, low: float, high: float, rounds: int = 9) -> dict[str, float]:
    return {"median_ms": median, "low_ms": low, "high_ms": high, "rounds": rounds}


def results(silicon: str = HERE, **times: dict[str, float]) -> dict[str, Any]:
    return {"silicon": silicon, "rows": [{"pattern": "Dense()", "tokens": 64, "dtype": "float32", **times}]}


def verdicts(old: Any, new: Any) -> dict[str, str]:
    return {row.path[-1]: verdict for verdict, row, _ in compare.compare(old, new)[0]}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (time(10.1, 9.9, 10.3), "same"),
        (time(9.3, 9.2, 9.4), "same"),  # surely faster, by less than processes differ
        (time(5.0, 4.9, 5.1), "faster"),
        (time(20.0, 19.0, 21.0), "slower"),
        (time(8.0, 5.0, 12.0), "undecided"),
        (time(9.0, 8.8, 9.2), "undecided"),  # about a tenth
        (time(10.0, 9.9, 10.1, rounds=5), "undecided"),  # five rounds have no 95 % interval
        (time(5.0, 4.9, 5.1, rounds=3), "faster"),
        (time(5.0, 4.9, 5.1, rounds=1), "undecided"),
        (time(5.0, 0.0, 5.1), "undecided"),
        (time(11.05, 11.045, 11.055), "undecided"),
    ],
)
def test_verdict_on_a_time(new: dict[str, float], verdict: str) -> None:
    old = time(10.0, 9.9, 10.1)
    assert verdicts(results(native=old), results(native=new)) == {"native": verdict}
    exchanged = {"faster": "slower", "slower": "faster"}.get(verdict, verdict)
    assert verdicts(results(native=new), results(native=old)) == {"native": exchanged}


def test_rows_of_one_side_and_times_of_other_hardware_are_counted() -> None:
    one = time(10, 9.9, 10.1)
    found, left = compare.compare(results(native=one, sdpa=one), results(native=one, tiles=one))
    assert [each.name for _, each, _ in found] == ["rows / pattern Dense(), tokens 64, dtype float32 / native"]
    assert left == "1 rows only in the old results, 1 rows only in the new results"
    elsewhere: tuple[list[Any], str] = [], "1 rows times of other hardware"
    assert compare.compare(results(native=one), results(ELSEWHERE, native=one)) == elsewhere
    assert compare.compare(time(1, 1, 1), time(1, 1, 1)) == elsewhere  # of none that is named


def test_the_report_says_all_that(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, times in ((old, time(10, 9.9, 10.1)), (new, time(20, 19.9, 20.1))):
        folder.mkdir()
        (folder / "one.json").write_text(json.dumps(results(native=times)))
    (old / "gone.json").write_text("{}")
    *lines, last = compare.report(old, new)
    assert [line.split()[0] for line in lines if line.endswith("/ native")] == ["slower"]
    assert "only in the old results: gone.json" in lines
    assert last == "rows in both: 1 slower"
    # Two files need not have one name.
    assert compare.report(old / "one.json", old / "one.json")[-1] == "rows in both: 1 same"
    assert compare.report(old / "gone.json", new / "one.json")[-1] == "rows in both: none"


@pytest.mark.parametrize("text", [None, "", "[1]", '{"rows": '])
def test_what_holds_no_results_is_an_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "choices.json").write_text(text)
    with pytest.raises(compare.NotResults, match="no results" if text is None else r"choices\.json"):
        compare.report(RESULTS, tmp_path)


@pytest.mark.parametrize("name", ["choices", "decode", "dispatch", "documents", "hilbert", "longnet"])
def test_our_own_results_are_compared_by_rows_of_their_own(name: str) -> None:
    """Each row once, and none of these undecided for want of a name in the other file."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    listed = [(each.path, each.unit) for each in compare.rows(found)]
    assert len(listed) == len(set(listed)) > 0
    own, left = compare.compare(found, found)
    assert len(own) == len(listed)
    assert not left
    assert not {verdict for verdict, _, _ in own} & {"faster", "slower", "lower", "higher"}
