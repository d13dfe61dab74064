"""Decisions on disk: what is written is read, all of it or nothing, and nothing on disk can stop a call."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

from attn_dispatch.store.folder import Store
from tests.support.entries import GROUP, KEY, OTHER, WHOLE, chosen, decision, files_in
from tests.support.fakes import SILICON, raising

# --- reading and writing ----------------------------------------------------------------------------------------------


def test_a_written_decision_is_read_back(folder: Path) -> None:
    given = decision(budget_ms=2000.0, elapsed_ms=12.5)
    assert Store(folder).put(given) == folder / "v2" / SILICON / GROUP / f"{KEY}.json"
    assert Store(folder).get(SILICON, GROUP, KEY) == given


def test_all_is_sorted_by_address(folder: Path) -> None:
    given = [decision(silicon=s, key=k) for s in ("cpu-b", "cpu-a") for k in (OTHER, KEY)]
    for each in given:
        Store(folder).put(each)
    found = [(each.silicon, each.key) for _, each in Store(folder).all()]
    assert found == [("cpu-a", KEY), ("cpu-a", OTHER), ("cpu-b", KEY), ("cpu-b", OTHER)]


@pytest.mark.parametrize(
    ("silicon", "key"),
    [
        *((name, KEY) for name in ("..", "/etc", "a/b", "", "Cpu", "a" * 129, SILICON + "\n")),
        *((SILICON, name) for name in ("", "../../../../etc/pass", KEY[:19], KEY + "0", KEY + "\n", KEY.upper())),
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


FAILURES: dict[str, str] = {"folder": "pathlib.Path.mkdir", "file": "os.fsync", "rename": "os.replace"}


@pytest.mark.parametrize("target", FAILURES.values(), ids=FAILURES)
def test_a_folder_that_cannot_be_written(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """The names of temporary files differ between attempts, the warning must not."""
    attempts = count()

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"/somewhere/file-{next(attempts)}.tmp")

    monkeypatch.setattr(target, refuse)
    for key in (KEY, OTHER, KEY):
        assert Store(folder).put(decision(key=key)) is None
    assert next(attempts) == 3
    (text,) = warnings()
    assert text.startswith("decisions are not stored: ")
    assert "Permission denied" in text
    monkeypatch.undo()
    assert files_in(folder) == []


@pytest.mark.parametrize("target", ["os.replace", "os.fsync"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
def test_an_interrupted_write_leaves_the_old_file(
    folder: Path, target: str, stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk too."""
    Store(folder).put(decision())
    monkeypatch.setattr(target, raising(stop))
    with nullcontext() if isinstance(stop, OSError) else pytest.raises(KeyboardInterrupt):
        Store(folder).put(decision(created="2026-01-01T00:00:00", **chosen("other")))
    assert files_in(folder) == [Store(folder).path(SILICON, GROUP, KEY)]
    assert Store(folder).get(SILICON, GROUP, KEY) == decision()


WRITES = 10
WRITER = """
import sys
from pathlib import Path
from datetime import UTC, datetime
from msgspec.structs import replace
from attn_dispatch.store import files
from attn_dispatch.store.folder import Store
from attn_dispatch.store.decision import decode

files.LOCK_S = 60.0  # of busy machines
store, name = Store(Path(sys.argv[1])), sys.argv[2]
given = decode(sys.stdin.buffer.read())
for i in range(int(sys.argv[3])):
    now = datetime.now(UTC).isoformat()
    row = replace(given.candidates[0], backend=f"{name} {i}", measured=now)
    title = f"{name} {i} " + "x" * (i * 97 % 5000)
    new = replace(given, title=title, created=now, choice=row.backend, candidates=(row,))
    assert store.put(new) is not None
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
        assert found is not None or not there, "a stored decision has disappeared"
        if found is not None:
            there = True
            yield found.title
        time.sleep(0.002)  # the writers need the processor


def test_eight_writers_lose_nothing(folder: Path, warnings: Callable[[], list[str]]) -> None:
    """Readers see whole files meanwhile; the rows of all writers are in the merged decision."""
    writers = [start_writer(folder, f"w{number}") for number in range(8)]
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
    expected = {f"w{number} {turn}" for number in range(8) for turn in range(WRITES)}
    assert {row.backend for row in found.candidates} == expected


def test_no_torch() -> None:
    code = "import sys, attn_dispatch.store.folder; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
