"""Markers of trials where files cannot be locked, on other machines, and where they are damaged or not written."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from attn_dispatch.store import crash_markers, files
from attn_dispatch.store.crash_markers import MarkerContent, Process, crash_marker
from attn_dispatch.store.quarantine import Quarantine
from tests.support.fakes import SILICON
from tests.support.quarantines import STARTED, TRIED, blamed, markers, path_of_new, start


@pytest.fixture
def unlockable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def plant(folder: Path, process: Process, locked: bool = False, age_s: float = 0.0, note: bytes = b"") -> Path:
    path = path_of_new(folder, ".mark")
    path.parent.mkdir(parents=True, exist_ok=True)
    marker = MarkerContent(
        backend="made_up",
        version="1",
        silicon=SILICON,
        title="x",
        scope="",
        process=process,
        locked=locked,
        began=time.time() - age_s,
    )
    path.write_bytes(files.encode_checked(marker) + note)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


HERE = msgspec.structs.replace(crash_markers._this_process(), host="here")


@pytest.mark.usefixtures("unlockable")
def test_without_locks_processes_are_looked_up(folder: Path, anew: Callable[[], Quarantine]) -> None:
    with crash_marker(folder, SILICON, "mine", "1", "x"):
        assert b'"locked":false' in markers(folder)[0].read_bytes()
        assert anew().entries() == []
        assert len(markers(folder)) == 1
    assert markers(folder) == []
    plant(folder, msgspec.structs.replace(HERE, start="1"))  # the pid is another process's now
    assert blamed(anew()) == ["made_up"]


@pytest.mark.usefixtures("unlockable")
def test_without_locks_a_crash_is_found(folder: Path, anew: Callable[[], Quarantine]) -> None:
    code = STARTED + "import errno, fcntl\ndef refuse(*_): raise OSError(errno.ENOLCK, '')\nfcntl.flock = refuse\n"
    trying = code + TRIED.removeprefix(STARTED).format("print(flush=True); time.sleep(60)")
    with start(folder, trying) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert anew().entries() == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but still listed
        assert blamed(anew()) == ["made_up"]


@pytest.mark.parametrize(
    "strange", [{"boot": "another", "host": "there"}, {"namespace": "pid:[1]"}], ids=["machine", "container"]
)
@pytest.mark.parametrize(("age_s", "is_out"), [(60.0, False), (7200.0, True), (-7200.0, True)])
def test_processes_that_cannot_be_looked_up(
    strange: dict[str, str],
    age_s: float,
    is_out: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], Quarantine],
) -> None:
    monkeypatch.setattr(crash_markers, "_machine", lambda: (HERE.namespace, HERE.boot, "here"))
    plant(folder, msgspec.structs.replace(HERE, pid=1, **strange), age_s=age_s)
    assert bool(blamed(anew())) is is_out
    assert len(markers(folder)) == (not is_out)


@pytest.mark.parametrize(
    ("there", "is_out"),
    [
        ({"boot": "another", "host": "there"}, True),
        ({"boot": "another", "host": "here"}, False),
        ({"boot": "another", "host": ""}, False),
        ({"boot": "", "host": "here"}, True),
        ({}, True),
    ],
)
def test_a_reboot_is_no_crash(
    there: dict[str, str],
    is_out: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], Quarantine],
) -> None:
    """A loss of power leaves the markers of all trials. With a released lock the age does not count."""
    monkeypatch.setattr(crash_markers, "_machine", lambda: (HERE.namespace, "now", "here"))
    plant(folder, msgspec.structs.replace(HERE, **{"boot": "now", **there}), locked=True)
    assert bool(blamed(anew())) is is_out
    assert markers(folder) == []


def test_the_marker_of_a_finished_trial_is_removed(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Read just before its removal, left where files cannot be removed, or left by a process killed at that moment."""
    plant(folder, HERE, locked=True, note=b"over\n")
    assert blamed(anew()) == []
    assert markers(folder) == []


def test_a_marker_that_another_process_has_removed(folder: Path) -> None:
    path = plant(folder, HERE, locked=True)
    handle = files.open_regular(path)
    path.unlink()
    assert crash_markers._examined(path, handle) is None
    plant(folder, HERE, locked=True)  # a later one, by the same name
    assert crash_markers._examined(path, handle) is None
    os.close(handle)


@pytest.mark.parametrize(("age_s", "left"), [(0.0, 1), (7200.0, 0)])
def test_a_marker_that_is_being_written(
    age_s: float, left: int, folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    path = plant(folder, HERE)
    path.write_bytes(path.read_bytes()[:100])
    then = time.time() - age_s
    os.utime(path, (then, then))
    assert anew().entries() == []
    assert len(markers(folder)) == left
    assert warnings() == []


def test_a_damaged_marker(folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]) -> None:
    path = plant(folder, HERE, locked=True)
    path.write_bytes(path.read_bytes().replace(b"made_up", b"made-up"))
    for _ in range(2):
        assert anew().entries() == []
    (text,) = warnings()
    assert text.startswith(f"ignored {path}: ")


def test_a_crash_that_cannot_be_recorded_stays_as_a_marker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    plant(folder, HERE, locked=True)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        for _ in range(2):
            assert blamed(anew()) == ["made_up"]
    assert len(markers(folder)) == 1
    assert len(warnings()) == 2
    assert blamed(anew()) == ["made_up"]
    assert markers(folder) == []


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.mkdir", "os.write"])
def test_a_trial_runs_if_its_marker_cannot_be_written(
    target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(target, refuse)
    entered = 0
    for _ in range(2):
        with crash_marker(folder, SILICON, "made_up", "1", "x"):
            entered += 1
    assert entered == 2
    assert markers(folder) == []
    assert crash_markers._own_markers == {}
    (text,) = warnings()
    assert text.startswith("a crash would not be recorded: ")


def test_trials_of_many_threads(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    barrier = threading.Barrier(8)

    def trial(name: str) -> None:
        for _ in range(5):
            with crash_marker(folder, SILICON, name, "1", "x"):
                barrier.wait(60)
                assert len(markers(folder)) == 8
                barrier.wait(60)

    threads = [threading.Thread(target=trial, args=(f"made_up_{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken
    assert markers(folder) == []
    assert (crash_markers._own_markers, crash_markers._notes) == ({}, {})
    assert len(os.listdir("/proc/self/fd")) == before
