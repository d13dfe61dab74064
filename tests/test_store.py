"""Decisions on disk: what is written is read, all of it or nothing, and nothing on disk can stop a call."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from attn_dispatch import candidates, files, store, stored
from attn_dispatch.bundle import write_bundle
from attn_dispatch.entry import canonical, encode
from attn_dispatch.group import group_of
from attn_dispatch.machine import silicon
from attn_dispatch.problem import Problem
from attn_dispatch.store import Decision, Row, Store
from tests.entries import GROUP, KEY, OTHER, chosen, decision, encoded, files_in, plant, written
from tests.fakes import SILICON

# --- reading and writing ----------------------------------------------------------------------------------------------


def test_what_is_put_is_got(folder: Path) -> None:
    given = decision(budget_ms=2000.0, elapsed_ms=12.5)
    assert Store(folder).put(given) == folder / "v2" / SILICON / GROUP / f"{KEY}.json"
    assert Store(folder).get(SILICON, GROUP, KEY) == given


def test_the_later_one_holds(folder: Path) -> None:
    for choice, created in (("sdpa", "2025-01-01T00:00:00"), ("other", "2025-01-01T00:00:01")):
        Store(folder).put(decision(created=created, **chosen(choice)))
    found = Store(folder).get(SILICON, GROUP, KEY)
    assert found is not None
    assert found.choice == "other"


def test_nothing_is_there_at_first(folder: Path, warnings: Callable[[], list[str]]) -> None:
    assert Store(folder).get(SILICON, GROUP, KEY) is None
    assert list(Store(folder).all()) == []
    assert not folder.exists()
    assert warnings() == []


def test_all_in_the_order_of_their_addresses(folder: Path) -> None:
    given = [decision(silicon=s, key=k) for s in ("cpu-b", "cpu-a") for k in (OTHER, KEY)]
    for each in given:
        Store(folder).put(each)
    found = [(each.silicon, each.key) for _, each in Store(folder).all()]
    assert found == [("cpu-a", KEY), ("cpu-a", OTHER), ("cpu-b", KEY), ("cpu-b", OTHER)]


def test_all_passes_over_damaged_files(folder: Path, warnings: Callable[[], list[str]]) -> None:
    plant(folder, b"{")
    Store(folder).put(decision(key=OTHER))
    assert [each.key for _, each in Store(folder).all()] == [OTHER]
    assert len(warnings()) == 1


@pytest.mark.parametrize(
    ("silicon", "key"),
    [
        ("..", KEY),
        ("../" + SILICON, KEY),
        ("/etc", KEY),
        ("a/b", KEY),
        ("", KEY),
        ("Cpu", KEY),
        ("a" * 129, KEY),
        (SILICON + "\n", KEY),
        (SILICON, ""),
        (SILICON, "../../../../etc/pass"),
        (SILICON, KEY[:19]),
        (SILICON, KEY + "0"),
        (SILICON, KEY + "\n"),
        (SILICON, KEY[:19] + "G"),
        (SILICON, KEY.upper()),
    ],
    ids=repr,
)
def test_addresses_stay_in_the_folder(folder: Path, silicon: str, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: Store(folder).path(silicon, GROUP, key),
        lambda: Store(folder).get(silicon, GROUP, key),
        lambda: Store(folder).put(decision(silicon=silicon, key=key)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a store address"):
            call()
    assert not folder.exists()


def test_a_clock_too_coarse_to_tell(folder: Path) -> None:
    given = decision(
        candidates=(
            Row(backend="sdpa", order="natural", status="chosen", median_ms=0.0, low_ms=0.0, high_ms=0.0, rounds=1),
        )
    )
    assert Store(folder).put(given) is not None
    assert Store(folder).get(SILICON, GROUP, KEY) == given


# --- damage -----------------------------------------------------------------------------------------------------------


def timed(**changes: object) -> dict[str, object]:
    return {"backend": "sdpa", "order": "natural", "status": "chosen", "median_ms": 1.0, **changes}


WHOLE = encode(decision())
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
    "later-schema": encoded(schema=3),
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


def test_the_damage_is_damage() -> None:
    assert all(content != WHOLE for content in DAMAGED.values())


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_a_miss_and_said_once(folder: Path, content: bytes, warnings: Callable[[], list[str]]) -> None:
    path = plant(folder, content)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
    (text,) = warnings()
    assert f"ignored {path}: " in text
    Store(folder).put(decision())
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


def test_a_folder_in_place_of_a_file(folder: Path, warnings: Callable[[], list[str]]) -> None:
    Store(folder).path(SILICON, GROUP, KEY).mkdir(parents=True)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
    assert len(warnings()) == 1
    for _ in range(2):
        assert Store(folder).put(decision()) is None
    assert len(warnings()) == 2


def test_a_file_in_place_of_the_folder(folder: Path, warnings: Callable[[], list[str]]) -> None:
    folder.write_text("not a folder")
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert Store(folder).put(decision()) is None
    assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert "decisions are not kept" in text


def test_links_in_a_circle_in_place_of_the_folder(folder: Path, warnings: Callable[[], list[str]]) -> None:
    folder.symlink_to(folder)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert Store(folder).put(decision()) is None
    assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert "decisions are not kept" in text


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read(
    folder: Path, code: int, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    path = plant(folder, WHOLE)

    def refuse(name: str, most: int) -> bytes:
        if str(name) != str(path):
            raise FileNotFoundError
        raise OSError(code, os.strerror(code), str(name))

    monkeypatch.setattr(files, "_read", refuse)
    for _ in range(2):
        assert Store(folder).get(SILICON, GROUP, KEY) is None
        assert list(Store(folder).all()) == []
    (text,) = warnings()
    assert f"ignored {path}: " in text


# --- writing that fails -----------------------------------------------------------------------------------------------

FAILURES: dict[str, str] = {"folder": "pathlib.Path.mkdir", "file": "tempfile.mkstemp", "rename": "os.replace"}


@pytest.mark.parametrize("target", FAILURES.values(), ids=FAILURES)
def test_a_folder_that_cannot_be_written(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """The names of temporary files differ from one attempt to the next, what is said must not."""
    attempts = count()

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"/somewhere/file-{next(attempts)}.tmp")

    monkeypatch.setattr(target, refuse)
    for key in (KEY, OTHER, KEY):
        assert Store(folder).put(decision(key=key)) is None
    assert next(attempts) == 3
    (text,) = warnings()
    assert text.startswith("decisions are not kept: ")
    assert "Permission denied" in text
    monkeypatch.undo()
    assert files_in(folder) == []


@pytest.mark.parametrize("target", ["os.replace", "os.fsync"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, MemoryError], ids=lambda kind: kind.__name__)
def test_a_writer_that_is_stopped_leaves_the_old_file(
    folder: Path, target: str, stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(folder).put(decision())

    def interrupt(*args: object) -> None:
        raise stop

    monkeypatch.setattr(target, interrupt)
    with pytest.raises(stop):
        Store(folder).put(decision(created="2026-01-01T00:00:00", **chosen("other")))
    assert files_in(folder) == [Store(folder).path(SILICON, GROUP, KEY)]
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


def test_a_full_disk_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(folder).put(decision())

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert Store(folder).put(decision(created="2026-01-01T00:00:00", **chosen("other"))) is None
    assert files_in(folder) == [Store(folder).path(SILICON, GROUP, KEY)]
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


def test_what_a_killed_writer_left_is_not_seen(folder: Path, warnings: Callable[[], list[str]]) -> None:
    """Killed between writing and renaming: nothing cleans up."""
    killed = "import os\nos.replace = lambda *paths: os._exit(9)\n" + WRITER
    command = [sys.executable, "-c", killed, str(folder), "one", "1"]
    assert subprocess.run(command, input=WHOLE, check=False, timeout=60).returncode == 9
    assert len(files_in(folder)) == 1
    assert Store(folder).get(SILICON, GROUP, KEY) is None
    assert list(Store(folder).all()) == []
    assert warnings() == []


def test_problems_that_were_missed_are_noted(folder: Path) -> None:
    for batch in (1, 2):
        store.note_missed(folder, {"batch": batch})
    assert (folder / store.MISSED).read_text() == '{"batch":1}\n{"batch":2}\n'


def test_problems_that_cannot_be_noted(folder: Path, warnings: Callable[[], list[str]]) -> None:
    folder.write_text("not a folder")
    for _ in range(2):
        store.note_missed(folder, {"batch": 1})
    (text,) = warnings()
    assert text.startswith("misses are not noted: ")


# --- many processes ---------------------------------------------------------------------------------------------------

WRITES = 200
WRITER = """
import sys
from pathlib import Path
from datetime import UTC, datetime
import msgspec
from attn_dispatch.store import Store, decode

store, name = Store(Path(sys.argv[1])), sys.argv[2]
given = decode(sys.stdin.buffer.read())
for i in range(int(sys.argv[3])):
    title = f"{name} {i} " + "x" * (i * 97 % 5000)
    created = datetime.now(UTC).isoformat()
    assert store.put(msgspec.structs.replace(given, title=title, created=created)) is not None
"""


def start_writer(folder: Path, name: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), name, str(WRITES)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(WHOLE)
    process.stdin.close()
    return process


def titles_seen(folder: Path, writers: list[subprocess.Popen[bytes]]) -> Iterator[str]:
    there = False
    while any(writer.poll() is None for writer in writers):
        found = Store(folder).get(SILICON, GROUP, KEY)
        assert found is not None or not there, "a decision that was there is gone"
        if found is not None:
            there = True
            yield found.title


def test_readers_see_whole_files_while_others_write(folder: Path, warnings: Callable[[], list[str]]) -> None:
    writers = [start_writer(folder, name) for name in ("one", "two")]
    seen = set(titles_seen(folder, writers))
    for writer in writers:
        with writer:
            assert writer.stderr is not None
            assert writer.stderr.read() == b""
        assert writer.returncode == 0
    assert warnings() == []
    assert len(seen) > 1
    assert files_in(folder) == [Store(folder).path(SILICON, GROUP, KEY)]
    found = Store(folder).get(SILICON, GROUP, KEY)
    assert found is not None
    assert found.title.split()[1] == str(WRITES - 1)


# --- where ------------------------------------------------------------------------------------------------------------


def test_the_folder_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "here"))
    assert store.cache_folder() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", "~/there")
    assert store.cache_folder() == tmp_path / "there"


@pytest.mark.parametrize("value", [None, ""])
def test_the_folder_by_default(value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if value is None:
        monkeypatch.delenv("ATTN_DISPATCH_CACHE_DIR")
    else:
        monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / "attn-dispatch"


def test_no_torch() -> None:
    code = "import sys, attn_dispatch.store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- shipped ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which shipped profiles are looked for."""
    package = tmp_path / "profiles"
    package.mkdir()
    monkeypatch.setattr(store, "package_files", lambda name: package)
    return package


def ship(package: Path, *decisions: Decision, silicon: str = SILICON) -> None:
    (package / f"{silicon}.json").write_bytes(write_bundle(decisions))


def test_shipped_decisions(package: Path) -> None:
    given = decision(source="shipped")
    ship(package, given, decision(key=OTHER), decision(silicon="cpu-other"))
    assert store.shipped(SILICON) == {KEY: given, OTHER: decision(key=OTHER, source="shipped")}


def test_nothing_is_shipped_for_most(package: Path, warnings: Callable[[], list[str]]) -> None:
    assert store.shipped(SILICON) == {}
    assert warnings() == []


def test_a_shipped_profile_of_a_later_schema(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision()]).replace(b'{"schema":2,', b'{"schema":3,', 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert store.shipped(SILICON) == {}
    (text,) = warnings()
    assert "schema 3" in text


def test_a_shipped_decision_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision(), decision(key=OTHER)]).replace(b"dense", b"dance", 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert list(store.shipped(SILICON)) == [OTHER]
    (text,) = warnings()
    assert f"decision 1, key {KEY!r}" in text
    assert "checksum" in text


def test_a_shipped_profile_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    (package / f"{SILICON}.json").write_bytes(WHOLE[:50])
    for _ in range(2):
        assert store.shipped(SILICON) == {}
        store.shipped.cache_clear()
    (text,) = warnings()
    assert "ignored the shipped profile" in text


def test_only_profiles_are_shipped(package: Path) -> None:
    (package.parent / "secret.json").write_bytes(write_bundle([decision()]))
    assert store.shipped("../secret") == {}


def test_files_are_as_open_as_the_users_others(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    path = Store(tmp_path).put(decision())
    assert path is not None
    assert path.stat().st_mode == plain.stat().st_mode


def test_the_mask_may_change(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        modes = []
        for mask, key in ((0o077, KEY), (0o007, OTHER)):
            os.umask(mask)
            path = Store(tmp_path).put(decision(key=key))
            assert path is not None
            modes.append(path.stat().st_mode & 0o777)
    finally:
        os.umask(before)
    assert modes == [0o600, 0o660]


def test_the_real_package_is_looked_into() -> None:
    assert store.shipped(SILICON) == {}


def rows(choice: str) -> tuple[Row, ...]:
    """Of every backend that there is now."""
    versions = candidates.versions().items()
    status = {choice: "chosen"}
    return tuple(
        Row(backend=name, order="natural", status=status.get(name, "not_measured"), version=version)
        for name, version in versions
    )


def test_shipped_decisions_lie_beneath_the_users(package: Path) -> None:
    x = torch.zeros(1, 8, 1, 4)
    problem = Problem.of(x, x, x)
    where = silicon(problem.device)
    common = {
        "key": problem.key(where),
        "silicon": where,
        "group": group_of(problem.to_dict()),
        "problem": problem.to_dict(),
    }
    ship(package, decision(choice="manual", candidates=rows("manual"), **common), silicon=where)
    found = stored.read(problem)
    assert found is not None
    assert (found.choice, found.source) == ("manual", "shipped")
    Store(store.cache_folder()).put(decision(choice="sdpa_mask", candidates=rows("sdpa_mask"), **common))
    found = stored.read(problem)
    assert found is not None
    assert (found.choice, found.source) == ("sdpa_mask", "measured")
