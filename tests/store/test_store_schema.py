"""Files of other versions: fields that a later version adds are preserved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from attn_dispatch.store.decision import Damaged, Row, decode, encode, to_plain
from attn_dispatch.store.folder import Store
from tests.support.entries import GROUP, KEY, OTHER, decision, encoded, files_in, plant, written
from tests.support.fakes import SILICON

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


def test_unknown_fields_stay_after_a_write_by_an_older_version(tmp_path: Path) -> None:
    path = plant(tmp_path, LATER)
    fresh = decision(created="2026-01-01T00:00:00.000000+00:00", title="fresh")
    Store(tmp_path).put(fresh)
    plain = json.loads(path.read_bytes())
    assert (plain["title"], plain["colour"], plain["extra"]) == ("fresh", "red", {"nested": [1, None]})
    assert [row.get("joules") for row in plain["candidates"]] == [3, None]


def test_an_unknown_field_cannot_replace_a_known_one() -> None:
    row = Row(backend="sdpa", order="natural", status="chosen", extra={"status": "failed"})
    given = decision(candidates=(row,), extra={"key": OTHER, "checksum": "0"})
    assert to_plain(given) == to_plain(replace(given, candidates=(replace(row, extra={}),), extra={}))


def test_rows_without_a_time_are_as_old_as_their_decision(tmp_path: Path) -> None:
    """Both ways round, so that the order of their bytes does not decide."""
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
def test_an_unreadable_decision_is_not_written(tmp_path: Path, value: float, warnings: Callable[[], list[str]]) -> None:
    row = replace(decision().candidates[0], error=value)
    for _ in range(2):
        assert Store(tmp_path).put(decision(candidates=(row,))) is None
    assert Store(tmp_path).put(decision(elapsed_ms=value)) is None
    assert Store(tmp_path).put(decision(choice="manual")) is None
    assert Store(tmp_path).put(decision(extra={"large": "x" * (1 << 24)})) is None
    assert files_in(tmp_path) == []
    assert [text.partition(": ")[2] for text in warnings()] == [
        "it holds a number that is not finite",
        "its choice is not its one chosen row",
        warnings()[-1].partition(": ")[2],
    ]
    assert "bytes, over" in warnings()[-1]
