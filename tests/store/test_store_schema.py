"""Files of other versions: what version 1 wrote is read where it lies, what a later one adds is carried along."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from attn_dispatch.spec.groups import group_of
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.decision import Damaged, Row, decode, encode, to_plain
from attn_dispatch.store.folder import Store
from tests.support.entries import GROUP, KEY, OTHER, decision, encoded, files_in, plant, written
from tests.support.fakes import SILICON

PROBLEM = problem_of((1, 64, 2, 8), Dense(), torch.float32, torch.device("cpu")).to_dict()
THERE = group_of(PROBLEM)


def one(**changes: Any) -> dict[str, Any]:
    """A file as version 1 wrote it."""
    none = dict.fromkeys(("low_ms", "high_ms", "first_ms", "rounds", "peak_bytes", "error"))
    row = {"backend": "sdpa", "order": "natural", "status": "chosen", "reason": "", "version": "1.2", "median_ms": 0.3}
    other = {"backend": "other", "order": "natural", "status": "not_installed", "reason": "no", "version": None}
    return {
        "schema": 1,
        "key": KEY,
        "silicon": SILICON,
        "title": "dense",
        "problem": PROBLEM,
        "choice": "sdpa",
        "order": "natural",
        "source": "measured",
        "candidates": [row | none, other | none | {"median_ms": None}],
        "versions": {"sdpa": "1.2", "other": "0.1", "gone": "3"},
        "provenance": {"torch": "2"},
        "created": "2025-01-01T00:00:00+00:00",
        "budget_ms": 2000.0,
        "elapsed_ms": 12.5,
        **changes,
    }


def plant_one(folder: Path, key: str = KEY, **changes: Any) -> Path:
    path = folder / "v1" / SILICON / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(one(key=key, **changes), indent=1))
    return path


# --- version 1 --------------------------------------------------------------------------------------------------------


def test_version_1_is_read(tmp_path: Path) -> None:
    plant_one(tmp_path)
    measured = "2025-01-01T00:00:00+00:00"
    common: dict[str, Any] = {"order": "natural", "measured": measured}
    rows = (
        Row(backend="sdpa", status="chosen", version="1.2", median_ms=0.3, **common),
        Row(backend="other", status="not_installed", reason="no", version="0.1", **common),
    )
    expected = decision(
        title="dense",
        problem=json.loads(json.dumps(PROBLEM)),
        group=THERE,
        candidates=rows,
        created=measured,
        budget_ms=2000.0,
        elapsed_ms=12.5,
    )
    assert Store(tmp_path).get(SILICON, THERE, KEY) == expected
    assert Store(tmp_path).get(SILICON, GROUP, KEY) is None
    assert decode(encode(expected)) == expected


def test_version_1_in_lists(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    old = plant_one(tmp_path, OTHER), plant_one(tmp_path)
    new = kept.path(SILICON, THERE, KEY)
    new.parent.mkdir(parents=True)
    new.write_bytes(encode(decision(group=THERE)))
    assert [(path, each.key) for path, each in kept.all()] == [(new, KEY), (old[0], OTHER)]
    assert [(each.key, each.title) for each in kept.group(SILICON, THERE)] == [(KEY, "dense Ω"), (OTHER, "dense")]
    assert kept.group(SILICON, GROUP) == []


def test_version_1_shows_through_a_damaged_file(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    path = plant_one(tmp_path)
    new = Store(tmp_path).path(SILICON, THERE, KEY)
    new.parent.mkdir(parents=True)
    new.write_bytes(b"{")
    assert [found for found, _ in Store(tmp_path).all()] == [path]
    assert Store(tmp_path).get(SILICON, THERE, KEY) is not None
    assert len(warnings()) == 1


def test_what_is_put_joins_version_1_whose_file_stays(tmp_path: Path) -> None:
    path = plant_one(tmp_path)
    before = path.read_bytes(), path.stat().st_mtime_ns
    fresh = decision(group=THERE, created="2025-06-01T00:00:00+00:00", candidates=decision().candidates[:1])
    Store(tmp_path).put(fresh)
    found = Store(tmp_path).get(SILICON, THERE, KEY)
    assert found is not None
    assert {row.backend: row.version for row in found.candidates} == {"sdpa": "1.2", "other": "0.1"}
    assert found.created == fresh.created
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": None},
        {"key": OTHER},
        {"silicon": "cpu-other"},
        {"problem": {}},
        {"problem": {**PROBLEM, "pattern": 3}},
        {"choice": "manual"},
        {"created": "then"},
        {"versions": None},
        {"candidates": []},
    ],
    ids=repr,
)
def test_a_damaged_file_of_version_1_is_a_miss(
    tmp_path: Path, changes: dict[str, Any], warnings: Callable[[], list[str]]
) -> None:
    path = plant_one(tmp_path)
    path.write_text(json.dumps(one(**changes)))
    for _ in range(2):
        assert Store(tmp_path).get(SILICON, THERE, KEY) is None
        assert Store(tmp_path).group(SILICON, THERE) == []
        assert list(Store(tmp_path).all()) == []
    (text,) = warnings()
    assert f"ignored {path}" in text


# --- later versions ---------------------------------------------------------------------------------------------------

LATER = encoded(
    colour="red",
    extra={"nested": [1, None]},
    candidates=[written()["candidates"][0] | {"joules": 3, "checksum": "its own"}, written()["candidates"][1]],
)


def test_unknown_fields_are_read_and_written_back(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    plant(tmp_path, LATER)
    found = Store(tmp_path).get(SILICON, GROUP, KEY)
    assert found is not None
    assert found.extra == {"colour": "red", "extra": {"nested": [1, None]}}
    assert [row.extra for row in found.candidates] == [{"joules": 3, "checksum": "its own"}, {}]
    assert json.loads(encode(found)) == json.loads(LATER)
    assert warnings() == []


def test_unknown_fields_outlive_what_an_older_version_puts(tmp_path: Path) -> None:
    path = plant(tmp_path, LATER)
    fresh = decision(created="2026-01-01T00:00:00.000000+00:00", title="fresh")
    Store(tmp_path).put(fresh)
    plain = json.loads(path.read_bytes())
    assert (plain["title"], plain["colour"], plain["extra"]) == ("fresh", "red", {"nested": [1, None]})
    assert [row.get("joules") for row in plain["candidates"]] == [3, None]


def test_an_unknown_field_cannot_take_the_place_of_a_known_one() -> None:
    row = Row(backend="sdpa", order="natural", status="chosen", extra={"status": "failed"})
    given = decision(candidates=(row,), extra={"key": OTHER, "checksum": "0"})
    assert to_plain(given) == to_plain(replace(given, candidates=(replace(row, extra={}),), extra={}))


def test_rows_without_a_time_are_as_old_as_their_decision(tmp_path: Path) -> None:
    """Each way round, so that no order of bytes can stand in for it."""
    for first, then in ((1.0, 2.0), (2.0, 1.0)):
        row = decision().candidates[0]
        for month, median in enumerate((first, then), 1):
            created = f"2025-0{month + 1}-01T00:00:0{first:.0f}+00:00"
            Store(tmp_path).put(decision(created=created, candidates=(replace(row, median_ms=median),)))
        found = Store(tmp_path).get(SILICON, GROUP, KEY)
        assert found is not None
        assert (found.candidates[0].median_ms, found.candidates[0].measured) == (then, found.created)


# --- the bytes --------------------------------------------------------------------------------------------------------


def test_another_spelling_of_the_same_content() -> None:
    plain = json.loads(encode(decision()))
    spelled = json.dumps(dict(reversed(plain.items())), indent=4, ensure_ascii=True).encode()
    assert decode(spelled) == decision()


def test_another_number_is_another_content() -> None:
    content = encode(decision())
    assert content.count(b'"rounds":7') == 1
    with pytest.raises(Damaged, match="checksum"):
        decode(content.replace(b'"rounds":7', b'"rounds":7.0'))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_could_not_be_read_back_is_not_written(
    tmp_path: Path, value: float, warnings: Callable[[], list[str]]
) -> None:
    row = replace(decision().candidates[0], error=value)
    for _ in range(2):
        assert Store(tmp_path).put(decision(candidates=(row,))) is None
    assert Store(tmp_path).put(decision(elapsed_ms=value)) is None
    assert Store(tmp_path).put(decision(choice="manual")) is None
    assert Store(tmp_path).put(decision(extra={"large": "x" * (1 << 24)})) is None
    assert files_in(tmp_path) == []
    assert [text.partition(": ")[2] for text in warnings()] == [
        "it holds a number that is not finite",
        "its choice is not the one row that is chosen",
        warnings()[-1].partition(": ")[2],
    ]
    assert "bytes, over" in warnings()[-1]
