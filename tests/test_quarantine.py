"""What is kept out stays out, in every process and in no other version, and a process that dies is not forgotten.

The processes that are started here load no torch.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attn_dispatch import contact as contacts
from attn_dispatch import quarantine, sealed
from attn_dispatch.contact import Marker, Process, dead, place_of
from attn_dispatch.quarantine import Entry, Quarantine, contact, silicons, sweep
from attn_dispatch.registry import LAST_RESORT
from tests.fakes import SILICON

GROUP = "0123456789ab"
STARTED = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from attn_dispatch.quarantine import Quarantine, contact

folder, silicon = Path(sys.argv[1]), sys.argv[2]
"""
TRIED = (
    STARTED
    + """
with contact(folder, silicon, "made_up", "1", "dense 1 x 64", patience_s=3600):
    {}
"""
)


def entry(**changes: Any) -> Entry:
    values: dict[str, Any] = {
        "backend": "made_up",
        "version": "1",
        "silicon": SILICON,
        "kind": "incorrect",
        "reason": "dq is wrong by 0.31",
        "title": "dense Ω",
    }
    return Entry(**(values | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "attn_dispatch")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def anew(folder: Path) -> Callable[[], Quarantine]:
    """The quarantine as a process sees it that has just started."""

    def start() -> Quarantine:
        quarantine._tables.clear()
        return Quarantine(folder, SILICON)

    return start


def path_of(folder: Path) -> Path:
    (path,) = place_of(folder, SILICON).glob("*.json")
    return path


def markers(folder: Path) -> list[Path]:
    return sorted(place_of(folder, SILICON).glob("*.mark"))


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(folder), SILICON]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, code: str) -> tuple[int, str, str]:
    with start(folder, code) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# --- entries ----------------------------------------------------------------------------------------------------------


def test_what_is_added_is_found_in_later_processes(folder: Path, anew: Callable[[], Quarantine]) -> None:
    given = entry(kind="hung", provenance={"torch": "2"})
    for found in (Quarantine(folder, SILICON), Quarantine(folder, SILICON), anew()):
        if not place_of(folder, SILICON).exists():
            found.add(given)
        assert found.find("made_up", "1") == given
        assert found.entries() == [given]
    assert silicons(folder) == [SILICON]


@pytest.mark.parametrize(
    ("scope", "asked", "is_out"),
    [("", "", True), ("", GROUP, True), (GROUP, GROUP, True), (GROUP, "", False), (GROUP, "f" * 12, False)],
)
def test_scopes(folder: Path, scope: str, asked: str, is_out: bool) -> None:
    kept = Quarantine(folder, SILICON)
    kept.add(entry(scope=scope))
    assert (kept.find("made_up", "1", asked) is not None) is is_out
    for backend, version in (("made_up", "2"), ("made_up", None), ("other", "1")):
        assert kept.find(backend, version, asked) is None
    assert Quarantine(folder, "cpu-other").find("made_up", "1", asked) is None


def test_a_backend_without_a_version(folder: Path, anew: Callable[[], Quarantine]) -> None:
    Quarantine(folder, SILICON).add(entry(version=None))
    assert anew().find("made_up", None) is not None
    assert anew().find("made_up", "") is None


def test_groups_and_versions_lie_side_by_side(folder: Path, anew: Callable[[], Quarantine]) -> None:
    given = [entry(), entry(scope=GROUP), entry(version="2"), entry(backend="other")]
    for each in reversed(given):
        Quarantine(folder, SILICON).add(each)
    assert anew().entries() == given


def test_the_folder_is_read_once(folder: Path, anew: Callable[[], Quarantine]) -> None:
    Quarantine(folder, SILICON).add(entry())
    path = path_of(folder)
    content = path.read_bytes()
    path.unlink()
    kept = anew()
    assert kept.find("made_up", "1") is None
    path.write_bytes(content)
    assert kept.find("made_up", "1") is None
    kept.reread()
    assert kept.find("made_up", "1") is not None


def test_nothing_is_made_before_there_is_something(folder: Path) -> None:
    assert Quarantine(folder, SILICON).find("made_up", "1") is None
    assert Quarantine(folder, SILICON).lift() == []
    assert silicons(folder) == []
    assert not folder.exists()


def test_an_entry_of_another_silicon(folder: Path) -> None:
    with pytest.raises(ValueError, match="cpu-other"):
        Quarantine(folder, SILICON).add(entry(silicon="cpu-other"))


@pytest.mark.parametrize("name", ["", "..", "../cpu", "a/b", "CPU", "a" * 129])
def test_paths_stay_in_the_folder(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="not a fingerprint"):
        Quarantine(folder, name)
    with pytest.raises(ValueError, match="not a fingerprint"), contact(folder, name, "made_up", "1", ""):
        raise AssertionError
    Quarantine(folder, SILICON).add(entry(backend="../../../escaped", scope="../x"))
    assert path_of(folder).parent == folder / "quarantine" / SILICON


def test_what_is_shown_is_one_line(folder: Path, anew: Callable[[], Quarantine]) -> None:
    Quarantine(folder, SILICON).add(entry(reason="RuntimeError:\n  at \x1b[31m0x7", title="a\tb"))
    (found,) = anew().entries()
    assert (found.reason, found.title) == ("RuntimeError: at ?[31m0x7", "a b")


# --- lifting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "left"), [("made_up", ["other"]), (None, []), ("nobody", ["made_up", "made_up", "other"])]
)
def test_lifting(folder: Path, name: str | None, left: list[str], anew: Callable[[], Quarantine]) -> None:
    given = [entry(), entry(scope=GROUP), entry(backend="other")]
    for each in given:
        Quarantine(folder, SILICON).add(each)
    kept = Quarantine(folder, SILICON)
    assert kept.lift(name) == [each for each in given if each.backend not in left]
    for found in (kept, anew()):
        assert [each.backend for each in found.entries()] == left


def test_another_process_is_lifted_too(folder: Path, anew: Callable[[], Quarantine]) -> None:
    kept = anew()
    assert kept.entries() == []
    mine = quarantine._tables.copy()
    anew().add(entry())
    quarantine._tables.update(mine)
    assert [each.backend for each in kept.lift("made_up")] == ["made_up"]
    assert anew().entries() == []


def test_what_cannot_be_removed_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    kept = Quarantine(folder, SILICON)
    kept.add(entry())

    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        assert kept.lift() == []
    assert kept.find("made_up", "1") is not None
    (text,) = warnings()
    assert "made_up stays in quarantine" in text


# --- a bad disk -------------------------------------------------------------------------------------------------------


def resealed(**changes: Any) -> bytes:
    return sealed.seal(entry(**changes))


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "truncated": resealed()[:-40],
    "flipped": resealed().replace(b"0.31", b"0.01"),
    "not-sealed": msgspec.json.encode(entry()),
    "not-json": b"\xff\xfe",
    "another-version": resealed(version="2"),
    "another-silicon": resealed(silicon="cpu-other"),
    "another-kind": resealed().replace(b"incorrect", b"unhealthy"),
    "control": resealed(reason="\x1b[2J"),
    "lines": resealed(title="a\nb"),
    "large": resealed(title="x" * sealed.LIMIT),
    "nested": b'{"sha256":"","content":' + b"[" * 30_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_ignored_and_said_once(
    folder: Path, content: bytes, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    Quarantine(folder, SILICON).add(entry())
    path = path_of(folder)
    assert content != path.read_bytes()
    path.write_bytes(content)
    for _ in range(2):
        assert anew().find("made_up", "1") is None
    (text,) = warnings()
    assert text.startswith(f"ignored {path}: ")
    anew().add(entry())
    assert anew().find("made_up", "1") is not None


def pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


@pytest.mark.parametrize("make", [pipe, link, lambda path, _: path.mkdir()], ids=["pipe", "link", "folder"])
@pytest.mark.parametrize("suffix", [".json", ".mark"])
def test_what_is_no_plain_file_is_not_opened(
    make: Callable[[Path, Path], None],
    suffix: str,
    folder: Path,
    anew: Callable[[], Quarantine],
    warnings: Callable[[], list[str]],
) -> None:
    """A pipe would be waited for."""
    Quarantine(folder, SILICON).add(entry())
    there = path_of(folder).rename(folder / "elsewhere")
    make(path_of_new(folder, suffix), there)
    for _ in range(2):
        assert anew().find("made_up", "1") is None
    (text,) = warnings()
    assert "ignored " in text


def path_of_new(folder: Path, suffix: str) -> Path:
    return place_of(folder, SILICON) / f"{contacts.digest(*entry().key)}{suffix}"


@pytest.mark.parametrize("target", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_a_folder_that_cannot_be_written(
    target: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], Quarantine],
    warnings: Callable[[], list[str]],
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(target, refuse)
        kept = Quarantine(folder, SILICON)
        for scope in ("", GROUP):
            kept.add(entry(scope=scope))
        (text,) = warnings()
        assert "for this process only" in text
    kept.reread()
    assert [each.scope for each in kept.entries()] == ["", GROUP]
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert anew().entries() == []


def test_what_could_not_be_written_can_be_lifted(folder: Path, warnings: Callable[[], list[str]]) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("not a folder")
    kept = Quarantine(folder, SILICON)
    kept.add(entry())
    assert kept.find("made_up", "1") is not None
    with contact(folder, SILICON, "made_up", "1", ""):
        pass
    assert sweep(folder, SILICON) == []
    folder.unlink()
    assert len(kept.lift()) == 1
    assert kept.find("made_up", "1") is None
    assert len(warnings()) == len({text.split(":")[0] for text in warnings()}) > 1


# --- a process that dies ----------------------------------------------------------------------------------------------

DEATHS = {
    "abort": "os.abort()",
    "segfault": "ctypes.string_at(0)",
    "kill": "os.kill(os.getpid(), 9)",
    "exit": "os._exit(3)",
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_a_death_is_remembered(
    death: str, folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    code, _, _ = run(folder, TRIED.format(death))
    assert code != 0
    assert len(markers(folder)) == 1
    found = anew().find("made_up", "1", GROUP)
    assert found is not None
    assert (found.kind, found.scope, found.title) == ("died", "", "dense 1 x 64")
    assert found.reason.startswith("the process died while made_up 1 ran dense 1 x 64 for the first time (segfault")
    (text,) = warnings()
    assert text == f"{found.reason}; `attn-dispatch doctor --lift made_up` lets it be tried again"
    assert markers(folder) == []
    assert anew().find("made_up", "1") == found
    assert anew().find("made_up", "2") is None
    assert len(warnings()) == 1
    assert anew().lift("made_up") == [found]
    assert anew().find("made_up", "1") is None


def test_a_death_in_a_group(folder: Path, anew: Callable[[], Quarantine]) -> None:
    run(folder, STARTED + f"with contact(folder, silicon, 'made_up', None, 'x', {GROUP!r}): os.abort()")
    kept = anew()
    assert kept.find("made_up", None, GROUP) is not None
    assert kept.find("made_up", None) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exceptions_are_no_death(error: type[BaseException], folder: Path, anew: Callable[[], Quarantine]) -> None:
    seen = []

    def fail() -> None:
        seen.extend(markers(folder))
        raise error

    with pytest.raises(error), contact(folder, SILICON, "made_up", "1", "x"):
        fail()
    assert len(seen) == 1
    assert markers(folder) == []
    assert anew().find("made_up", "1") is None


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(3)",
        "signal.raise_signal(signal.SIGINT)",
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ],
)
def test_a_regular_end_is_no_death(ending: str, folder: Path) -> None:
    run(folder, TRIED.format(ending))
    assert place_of(folder, SILICON).is_dir()
    assert markers(folder) == []


def test_the_main_thread_may_end_before_a_trial(folder: Path, anew: Callable[[], Quarantine]) -> None:
    trial = """
def trial():
    with contact(folder, silicon, "made_up", "1", "x"):
        entered.set()
        time.sleep(60)

entered = threading.Event()
threading.Thread(target=trial, daemon=True).start()
entered.wait()
print(len(list(folder.rglob("*.mark"))))
"""
    assert run(folder, STARTED + trial) == (0, "1\n", "")
    assert markers(folder) == []


@pytest.mark.parametrize(
    ("number", "patience", "kind"),
    [
        *(("SIGTERM", patience, kind) for patience, kind in (("3600", None), ("None", None), ("0", "hung"))),
        *((number, "3600", None) for number in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU", "SIGQUIT")),
    ],
)
def test_being_told_to_stop_is_no_death(
    number: str, patience: str, kind: str | None, folder: Path, anew: Callable[[], Quarantine]
) -> None:
    """Sooner than a trial may take, it is a scheduler's doing; later, somebody had waited long enough."""
    trial = TRIED.replace("3600", patience).format(f"time.sleep(0.1); os.kill(os.getpid(), signal.{number})")
    code, _, _ = run(folder, trial)
    assert code == -signal.Signals[number]
    assert len(markers(folder)) == 1
    found = anew().find("made_up", "1")
    assert (found and found.kind) == kind
    assert markers(folder) == []


def test_a_child_of_multiprocessing_may_end_before_a_trial(folder: Path) -> None:
    """It leaves by os._exit."""
    code = """
import multiprocessing

def trial():
    with contact(folder, silicon, "made_up", "1", "x"):
        entered.set()
        time.sleep(60)

def child():
    threading.Thread(target=trial, daemon=True).start()
    entered.wait()
    print(len(list(folder.rglob("*.mark"))), flush=True)

entered = threading.Event()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""
    assert run(folder, STARTED + code) == (0, "1\n", "")
    assert markers(folder) == []


def test_the_last_resort_is_never_kept_out(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """There would be nothing else to run."""
    assert quarantine.LAST_RESORT == LAST_RESORT
    code, _, _ = run(folder, TRIED.replace("made_up", LAST_RESORT).format("os.abort()"))
    assert code != 0
    assert len(markers(folder)) == 1
    assert anew().entries() == []
    assert markers(folder) == []


def test_being_killed_in_c_code_that_keeps_the_interpreter(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Python's own handlers would not run there."""
    with start(folder, TRIED.replace("3600", "0").format("print(flush=True); ctypes.PyDLL(None).sleep(60)")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.terminate()
    found = anew().find("made_up", "1")
    assert found is not None
    assert found.kind == "hung"


def test_others_handlers_are_left_alone(folder: Path) -> None:
    """Python's, which C code's may stand behind, and those that only C code knows of."""
    code = """
import faulthandler
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
dump = open(folder.parent / "dump", "w+")
faulthandler.register(signal.SIGHUP, file=dump)
with contact(folder, silicon, "made_up", "1", "x"):
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    print(len(next(folder.rglob("*.mark")).read_text().splitlines()))
os.kill(os.getpid(), signal.SIGHUP)
print((folder.parent / "dump").read_text().count("most recent call first"))
"""
    assert run(folder, STARTED + code) == (0, "handled\n1\n2\n", "")


def test_a_handler_set_during_a_trial_stays(folder: Path) -> None:
    """In another thread's, say: without it, a later alarm would end the process. Afterwards signals are noted again."""
    code = """
with contact(folder, silicon, "made_up", "1", "x"):
    signal.signal(signal.SIGALRM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGALRM)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
with contact(folder, silicon, "made_up", "1", "x"):
    os.kill(os.getpid(), signal.SIGALRM)
"""
    assert run(folder, STARTED + code) == (-signal.SIGALRM, "handled\n", "")
    assert [found.told_to_stop for found in dead(place_of(folder, SILICON))] == [True]


def test_signals_end_the_process_as_before(folder: Path) -> None:
    code = """
with contact(folder, silicon, "made_up", "1", "x"):
    with contact(folder, silicon, "made_up", "2", "x"):
        pass
    inside = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
print(int(inside, 16) >> 14 & 1, int(open("/proc/self/status").read().split("SigCgt:")[1].split()[0], 16) >> 14 & 1)
"""
    assert run(folder, STARTED + code) == (0, "1 0\n", "")


# --- processes that live ----------------------------------------------------------------------------------------------


@pytest.fixture
def trying(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a trial."""
    with start(folder, TRIED.format("print(flush=True); time.sleep(60)")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_trial_that_goes_on_is_left_alone(
    trying: subprocess.Popen[str], folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    with contact(folder, SILICON, "mine", "1", "x"):
        kept = anew()
        assert kept.entries() == []
        assert len(markers(folder)) == 2
    trying.kill()
    trying.wait()
    assert kept.find("made_up", "1") is None
    assert [each.backend for each in kept.sweep()] == ["made_up"]
    assert kept.find("made_up", "1") is not None
    assert len(warnings()) == 1


def test_a_forked_child_does_not_keep_the_marker_alive(folder: Path, anew: Callable[[], Quarantine]) -> None:
    forking = "os.fork() or print(os.getpid(), flush=True); time.sleep(60)"
    with start(folder, TRIED.format(forking)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            assert anew().find("made_up", "1") is not None
        finally:
            os.kill(child, signal.SIGKILL)  # fails if it was not there


def test_a_forked_child_does_not_take_the_marker_away(folder: Path) -> None:
    code = """
with contact(folder, silicon, "made_up", "1", "x"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(len(list(folder.rglob("*.mark"))))
if not child:
    with contact(folder, silicon, "made_up", "2", "x"):
        os.abort()
"""
    assert run(folder, STARTED + code) == (0, "2\n", "")
    assert [each.version for each in sweep(folder, SILICON)] == ["2"]


def test_markers_are_swept_by_many_at_once(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Whoever comes second, while the first is at it, must not take the lock for the backend's."""
    run(folder, TRIED.format("os.abort()"))
    place = place_of(folder, SILICON)
    seen = []
    for first in dead(place):
        for second in dead(place):
            seen.append(second)
        os.unlink(first.path)
        assert list(dead(place)) == []
    assert [each.marker.backend for each in seen] == ["made_up"]


def test_processes_that_start_at_once_all_know(folder: Path) -> None:
    for version in "1234":
        run(folder, TRIED.replace('"1"', f'"{version}"').format("os.abort()"))
    asking = """
while not (folder / "go").exists():
    pass
print(*(Quarantine(folder, silicon).find("made_up", version).kind for version in "1234"))
"""
    processes = [start(folder, STARTED + asking) for _ in range(4)]
    (folder / "go").touch()
    for process in processes:
        with process:
            assert process.communicate(timeout=60)[0] == "died died died died\n"
    assert markers(folder) == []
    assert len(list(place_of(folder, SILICON).iterdir())) == 4


# --- file systems without locks, other machines -----------------------------------------------------------------------


@pytest.fixture
def unlockable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def plant(folder: Path, process: Process, locked: bool = False, age_s: float = 0.0, note: bytes = b"") -> Path:
    path = path_of_new(folder, ".mark")
    path.parent.mkdir(parents=True, exist_ok=True)
    marker = Marker(
        backend="made_up",
        version="1",
        silicon=SILICON,
        title="x",
        scope="",
        process=process,
        locked=locked,
        began=time.time() - age_s,
    )
    path.write_bytes(sealed.seal(marker) + note)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


HERE = msgspec.structs.replace(contacts._this_process(), host="here")


@pytest.mark.usefixtures("unlockable")
def test_without_locks_processes_are_looked_up(folder: Path, anew: Callable[[], Quarantine]) -> None:
    with contact(folder, SILICON, "mine", "1", "x"):
        assert b'"locked":false' in markers(folder)[0].read_bytes()
        assert anew().entries() == []
        assert len(markers(folder)) == 1
    assert markers(folder) == []
    plant(folder, msgspec.structs.replace(HERE, start="1"))  # the pid is another process's now
    assert anew().find("made_up", "1") is not None


@pytest.mark.usefixtures("unlockable")
def test_without_locks_a_death_is_remembered(folder: Path, anew: Callable[[], Quarantine]) -> None:
    code = STARTED + "import errno, fcntl\ndef refuse(*_): raise OSError(errno.ENOLCK, '')\nfcntl.flock = refuse\n"
    trying = code + TRIED.removeprefix(STARTED).format("print(flush=True); time.sleep(60)")
    with start(folder, trying) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert anew().entries() == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but still listed
        assert anew().find("made_up", "1") is not None


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
    monkeypatch.setattr(contacts, "_machine", lambda: (HERE.namespace, HERE.boot, "here"))
    plant(folder, msgspec.structs.replace(HERE, pid=1, **strange), age_s=age_s)
    assert (anew().find("made_up", "1") is not None) is is_out
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
def test_a_reboot_is_no_death(
    there: dict[str, str],
    is_out: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], Quarantine],
) -> None:
    """A loss of power leaves the markers of all trials. A lock that is gone needs no age."""
    monkeypatch.setattr(contacts, "_machine", lambda: (HERE.namespace, "now", "here"))
    plant(folder, msgspec.structs.replace(HERE, **{"boot": "now", **there}), locked=True)
    assert (anew().find("made_up", "1") is not None) is is_out
    assert markers(folder) == []


def test_a_marker_that_its_process_had_done_with(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Seen at the moment it goes, left where files cannot be removed, or by a process that was killed just then."""
    plant(folder, HERE, locked=True, note=b"over\n")
    assert anew().find("made_up", "1") is None
    assert markers(folder) == []


def test_a_marker_that_another_process_took_note_of(folder: Path) -> None:
    path = plant(folder, HERE, locked=True)
    handle = sealed.open_regular(path)
    path.unlink()
    assert contacts._examined(path, handle) is None
    plant(folder, HERE, locked=True)  # a later one, by the same name
    assert contacts._examined(path, handle) is None
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


def test_news_that_cannot_be_written_down_is_kept_as_a_marker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    plant(folder, HERE, locked=True)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        for _ in range(2):
            assert anew().find("made_up", "1") is not None
    assert len(markers(folder)) == 1
    assert len(warnings()) == 2
    assert anew().find("made_up", "1") is not None
    assert markers(folder) == []


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.mkdir", "os.write"])
def test_a_trial_goes_on_unmarked(
    target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(target, refuse)
    entered = 0
    for _ in range(2):
        with contact(folder, SILICON, "made_up", "1", "x"):
            entered += 1
    assert entered == 2
    assert markers(folder) == []
    assert contacts._held == {}
    (text,) = warnings()
    assert text.startswith("a crash could not be remembered: ")


def test_trials_of_many_threads(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    met = threading.Barrier(8)

    def trial(name: str) -> None:
        for _ in range(5):
            with contact(folder, SILICON, name, "1", "x"):
                met.wait(60)
                assert len(markers(folder)) == 8
                met.wait(60)

    threads = [threading.Thread(target=trial, args=(f"made_up_{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met.broken
    assert markers(folder) == []
    assert (contacts._held, contacts._noted) == ({}, set())
    assert len(os.listdir("/proc/self/fd")) == before
