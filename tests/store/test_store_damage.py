"""Damaged files of decisions, and other things in their place: a miss, with one warning."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch.store import files
from attn_dispatch.store.decision import LaterSchema, canonical
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
    "two": WHOLE + WHOLE,
    "zeros": b"\0" * 4096,
    "not-utf-8": WHOLE.replace("Ω".encode(), b"\xff"),
    "list": b"[]",
    "null": b"null",
    "no-fields": b"{}",
    "missing-field": encoded(without="choice"),
    "wrong-type": encoded(choice=3),
    "wrong-row": encoded(candidates=[{"backend": "sdpa"}]),
    "nan": WHOLE.replace(b'"rounds":7', b'"rounds":NaN'),
    "negative-time": encoded(candidates=[timed(median_ms=-1.0)]),
    "negative-first-call": encoded(candidates=[timed(first_ms=-1.0)]),
    "negative-ratio": encoded(candidates=[timed(ratio_low=-0.5)]),
    "negative-memory": encoded(candidates=[timed(peak_bytes=-1)]),
    "negative-rounds": encoded(candidates=[timed(rounds=-1)]),
    "below-its-interval": encoded(candidates=[timed(low_ms=2.0)]),
    "beyond-its-interval": encoded(candidates=[timed(high_ms=0.5)]),
    "no-interval": encoded(candidates=[timed(median_ms=None, low_ms=2.0, high_ms=1.0)]),
    "older-schema": encoded(schema=1),
    "schema-of-another-kind": encoded(schema="2"),
    "no-checksum": canonical(written()),
    "other-checksum": WHOLE.replace(b'"checksum":"', b'"checksum":"0'),
    "checksum-of-another-kind": canonical({**written(), "checksum": 3}),
    "other-time": WHOLE.replace(b"0.30000000000000004", b"0.3"),
    "no-choice": encoded(choice="", order=""),
    "choice-without-row": encoded(choice="manual"),
    "choice-in-another-order": encoded(order="hilbert"),
    "choice-that-is-slower": encoded(candidates=[written()["candidates"][0] | {"status": "slower"}]),
    "two-choices": encoded(candidates=[row | {"status": "chosen"} for row in written()["candidates"]]),
    "two-rows-of-one": encoded(candidates=written()["candidates"][:1] + written()["candidates"][1:] * 2),
    "no-time": encoded(created="yesterday"),
    "row-without-time": encoded(candidates=[written()["candidates"][0] | {"measured": "then"}]),
    "infinite": encoded().replace(b'"rounds":7', b'"rounds":1e999'),
    "many-digits": encoded().replace(b'"rounds":7', b'"rounds":' + b"7" * 10_000),
    "huge": WHOLE + b" " * (1 << 24),
    "other-group": encoded(group="f" * 12),
    "no-group": encoded(group="../../etc"),
    "other-key": encoded(key=OTHER),
    "other-silicon": encoded(silicon="cpu-other"),
    "nested": WHOLE.replace(b'"batch":1', b'"batch":' + b"[" * 1_000_000),
}


def test_every_damaged_content_differs() -> None:
    assert all(content != WHOLE for content in DAMAGED.values())


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_a_miss_with_one_warning(folder: Path, content: bytes, warnings: Callable[[], list[str]]) -> None:
    path = plant(folder, content)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
    (text,) = warnings()
    assert f"ignored {path}: " in text
    Store(folder).put(decision())
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


def test_a_later_version_s_file_stays(folder: Path, warnings: Callable[[], list[str]]) -> None:
    later = encoded(schema=3)
    path = plant(folder, later)
    for title in ("one", "two"):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert Store(folder).put(decision(title=title)) is None
        Store(folder).amend(decision(), environment="changed")
        with pytest.raises(LaterSchema):
            Store(folder).add(decision())
    assert path.read_bytes() == later
    assert files_in(folder) == [path]
    assert warnings() == [f"ignored {path}: schema 3, this version reads 2, and leaves the file as it is"]


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


def test_a_folder_in_place_of_a_file(folder: Path, warnings: Callable[[], list[str]]) -> None:
    Store(folder).path(SILICON, GROUP, KEY).mkdir(parents=True)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
    assert len(warnings()) == 1
    for _ in range(2):
        assert Store(folder).put(decision()) is None
    assert len(warnings()) == 2


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


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read(
    folder: Path, code: int, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    path = plant(folder, WHOLE)

    def refuse(name: str, most: int, follow: bool) -> bytes:
        if str(name) != str(path):
            raise FileNotFoundError
        raise OSError(code, os.strerror(code), str(name))

    monkeypatch.setattr(files, "_read", refuse)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert f"ignored {path}: " in text
