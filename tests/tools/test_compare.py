"""`python -m tools.bench --compare`: verdicts on made-up results, and that every results file has comparable rows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tools.lib import compare
from tools.lib.suite import RESULTS

HERE, ELSEWHERE = "cpu-one-2c-2t", "cpu-other-8c-8t"


def time(median: float, low: float, high: float, rounds: int = 9) -> dict[str, float]:
    return {"median_ms": median, "low_ms": low, "high_ms": high, "rounds": rounds}


def ratio(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}


def results(silicon: str = HERE, **times: dict[str, float]) -> dict[str, Any]:
    return {"silicon": silicon, "rows": [{"pattern": "Dense()", "tokens": 64, "dtype": "float32", **times}]}


def verdicts(old: Any, new: Any) -> dict[str, str]:
    return {each.old.path[-1]: each.verdict for each in compare.compare(old, new).comparisons}


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


@pytest.mark.parametrize(("new", "verdict"), [(3.0, "higher"), (1.0, "lower"), (2.0, "same")])
def test_verdict_on_a_ratio(new: float, verdict: str) -> None:
    found = verdicts(results(gain=ratio(2.0, 1.98, 2.02)), results(gain=ratio(new, new * 0.99, new * 1.01)))
    assert found == {"gain": verdict}


def test_the_quotient_is_bounded_by_both_intervals() -> None:
    (found,) = compare.compare(results(native=time(10, 8, 16)), results(native=time(20, 16, 24))).comparisons
    assert (found.quotient.low, found.quotient.high) == (16 / 16, 24 / 8)


def test_rows_of_one_side_are_listed() -> None:
    one, other = time(10, 9.9, 10.1), time(10, 9.9, 10.1)
    found = compare.compare(results(native=one, sdpa=one), results(native=other, tiles=other))
    item = "rows / pattern Dense(), tokens 64, dtype float32"
    assert [each.old.name for each in found.comparisons] == [f"{item} / native"]
    assert (found.only_old, found.only_new) == ([f"{item} / sdpa"], [f"{item} / tiles"])


def test_rows_are_found_whatever_their_place() -> None:
    old = results(native=time(10, 9.9, 10.1))
    new = copy.deepcopy(old)
    new["rows"].insert(0, {"pattern": "Dense()", "tokens": 128, "dtype": "float32", "native": time(90, 89, 91)})
    assert verdicts(old, new) == {"native": "same"}


def test_what_was_measured_does_not_name_a_row() -> None:
    old, new = results(native=time(10, 9.9, 10.1)), results(native=time(10, 9.9, 10.1))
    old["rows"][0] |= {"best": "native", "peak_bytes": 1, "rounds": 7}
    new["rows"][0] |= {"best": "sdpa", "peak_bytes": 2, "rounds": 9}
    assert verdicts(old, new) == {"native": "same"}


def test_items_of_the_same_name_are_numbered() -> None:
    old = results(native=time(10, 9.9, 10.1))
    old["rows"].append(copy.deepcopy(old["rows"][0]))
    new = copy.deepcopy(old)
    new["rows"][1]["native"] = time(20, 19.9, 20.1)
    assert [each.verdict for each in compare.compare(old, new).comparisons] == ["same", "slower"]


def test_on_other_hardware_times_are_relative_to_one_another() -> None:
    old = results(sdpa=time(10, 9.9, 10.1), native=time(5, 4.95, 5.05), gain=ratio(2, 1.99, 2.01))
    # Everything takes three times as long; native beyond that twice as long.
    new = results(ELSEWHERE, sdpa=time(30, 29.7, 30.3), native=time(30, 29.7, 30.3), gain=ratio(1, 0.99, 1.01))
    assert verdicts(old, new) == {"native over sdpa": "slower", "gain": "lower"}
    new["rows"][0]["native"] = time(15, 14.9, 15.1)
    assert verdicts(old, new)["native over sdpa"] == "same"


def test_on_other_hardware_a_time_alone_is_not_compared() -> None:
    found = compare.compare(results(native=time(10, 9.9, 10.1)), results(ELSEWHERE, native=time(10, 9.9, 10.1)))
    assert found.comparisons == []
    assert [name.split(" / ")[-1] for name in found.not_compared] == ["native"]


def test_results_without_hardware_are_of_other_hardware() -> None:
    assert not compare.same_hardware({}, {})


def test_the_report_says_all_that(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, silicon in ((old, HERE), (new, ELSEWHERE)):
        folder.mkdir()
        times = {"sdpa": time(10, 9.9, 10.1), "native": time(5, 4.95, 5.05)}
        (folder / "one.json").write_text(json.dumps(results(silicon, **times)))
    (old / "gone.json").write_text("{}")
    text = "\n".join(compare.report(old, new))
    assert "other hardware: times are not compared" in text
    assert "native over sdpa" in text
    assert "only in the old results: gone.json" in text
    assert text.endswith("rows in both: 1 same")
    assert "other hardware" not in "\n".join(compare.report(old, old))


def test_two_files_of_different_names_are_compared(tmp_path: Path) -> None:
    for name in ("before.json", "after.json"):
        (tmp_path / name).write_text(json.dumps(results(native=time(10, 9.9, 10.1))))
    assert compare.report(tmp_path / "before.json", tmp_path / "after.json")[-1] == "rows in both: 1 same"


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(compare.NotResults, match="no results"):
        compare.report(RESULTS, tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": '])
def test_a_file_that_holds_no_results_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "choices.json").write_text(text)
    with pytest.raises(compare.NotResults, match=r"choices\.json"):
        compare.report(tmp_path, tmp_path)


def test_files_that_share_no_row_name_theirs(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(json.dumps(results(sdpa=time(10, 9.9, 10.1))))
    (tmp_path / "after.json").write_text(json.dumps(results(native=time(10, 9.9, 10.1))))
    text = "\n".join(compare.report(tmp_path / "before.json", tmp_path / "after.json"))
    assert "only in the old results" in text
    assert "only in the new results" in text


@pytest.mark.parametrize("name", ["choices", "decode", "dispatch", "documents", "hilbert", "kernels", "longnet"])
def test_our_own_results_are_compared_by_rows_of_their_own(name: str) -> None:
    """Each row once, and none of these undecided for want of a name in the other file."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    listed = [(each.path, each.unit) for each in compare.rows(found)]
    assert len(listed) == len(set(listed)) > 0
    own = compare.compare(found, found)
    assert len(own.comparisons) == len(listed)
    assert not {each.verdict for each in own.comparisons} & {"faster", "slower", "lower", "higher"}
