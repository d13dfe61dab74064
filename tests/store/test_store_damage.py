"""Damaged files of decisions, and other things in their place: a miss, with one warning."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from attn_dispatch.store import files
from attn_dispatch.store.decision import canonical, decode, encode
from attn_dispatch.store.folder import Store
from tests.support.entries import GROUP, KEY, OTHER, WHOLE, decision, encoded, files_in, plant, written
from tests.support.fakes import SILICON


def timed(**changes: object) -> dict[str, object]:
    return {"backend": "sdpa", "order": "natural", "status": "chosen", "median_ms": 1.0, **changes}


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "not-json": b"decision",
    "cut-in-half": WHOLE[: len(WHOLE) // 2],
    "cut-at-the-end": WHOLE[:-1],
    "list": b"[]",
    "missing-field": encoded(without="choice"),
    "wrong-type": encoded(choice=3),
    "nan": WHOLE.replace(b'"rounds":7', b'"rounds":NaN'),
    "negative-time": encoded(candidates=[timed(median_ms=-1.0)]),
    "below-its-interval": encoded(candidates=[timed(low_ms=2.0)]),
    "older-schema": encoded(schema=1),
    "later-schema": encoded(schema=3),
    "no-checksum": canonical(written()),
    "other-checksum": WHOLE.replace(b'"checksum":"', b'"checksum":"0'),
    "other-time": WHOLE.replace(b"0.30000000000000004", b"0.3"),
    "no-choice": encoded(choice="", order=""),
    "choice-in-another-order": encoded(order="hilbert"),
    "choice-that-is-slower": encoded(candidates=[written()["candidates"][0] | {"status": "slower"}]),
    "two-choices": encoded(candidates=[row | {"status": "chosen"} for row in written()["candidates"]]),
    "two-rows-of-one": encoded(candidates=written()["candidates"][:1] + written()["candidates"][1:] * 2),
    "no-time": encoded(created="yesterday"),
    "infinite": encoded().replace(b'"rounds":7', b'"rounds":1e999'),
    "many-digits": encoded().replace(b'"rounds":7', b'"rounds":' + b"7" * 10_000),
    "huge": WHOLE + b" " * (1 << 24),
    "other-group": encoded(group="f" * 12),
    "no-group": encoded(group="../../etc"),
    "other-key": encoded(key=OTHER),
    "other-silicon": encoded(silicon="cpu-other"),
    "nested": WHOLE.replace(b'"batch":1', b'"batch":' + b"[" * 1_000_000),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_a_miss_with_one_warning(folder: Path, content: bytes, warnings: Callable[[], list[str]]) -> None:
    assert content != WHOLE
    path = plant(folder, content)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
    (text,) = warnings()
    assert f"ignored {path}: " in text
    Store(folder).put(decision())
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


def test_a_link_in_place_of_a_file_is_not_followed(folder: Path, warnings: Callable[[], list[str]]) -> None:
    path = plant(folder, WHOLE)
    path.rename(folder / "moved")
    path.symlink_to(folder / "moved")
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert f"ignored {path}: " in text
    assert "symbolic link" in text


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to(path)], ids=["file", "circular link"])
def test_what_stands_in_place_of_the_folder(
    make: Callable[[Path], None], folder: Path, warnings: Callable[[], list[str]]
) -> None:
    make(folder)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert Store(folder).put(decision()) is None
    assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert "decisions are not stored" in text


@pytest.mark.parametrize("stale", [1, 2])
def test_a_file_that_another_host_replaces(
    stale: int, folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """Over NFS the old one is gone between look-up and opening: it is read again, once."""
    path = plant(folder, WHOLE)
    real, left = files._read, [OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))] * stale

    def read(name: str, most: int, follow: bool) -> bytes:
        if left:
            raise left.pop()
        return real(name, most, follow)

    monkeypatch.setattr(files, "_read", read)
    assert (Store(folder).get(SILICON, GROUP, KEY) is None) is (stale == 2)
    assert [f"ignored {path}: " in text for text in warnings()] == [True] * (stale == 2)


def test_another_spelling_of_the_same_content() -> None:
    plain = json.loads(encode(decision()))
    spelled = json.dumps(dict(reversed(plain.items())), indent=4, ensure_ascii=True).encode()
    assert decode(spelled) == decision()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unreadable_decision_is_not_written(tmp_path: Path, value: float, warnings: Callable[[], list[str]]) -> None:
    row = replace(decision().candidates[0], error=value)
    given = (
        (decision(candidates=(row,)), "Out of range float values are not JSON compliant"),
        (decision(elapsed_ms=value), "Out of range float values are not JSON compliant"),
        (decision(choice="manual"), "its choice is not its one chosen row"),
        (decision(environment="x" * (1 << 24)), "bytes, over"),
    )
    for each, why in given:
        assert Store(tmp_path).put(each) is None
        assert why in warnings()[-1]
    assert files_in(tmp_path) == []
