"""A process that crashes in a trial quarantines the version; one that ends otherwise, or runs on, does not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn_dispatch.kernels.registry import LAST_RESORT
from attn_dispatch.store import quarantine, signal_notes
from attn_dispatch.store.crash_markers import abandoned, crash_marker, place_of
from attn_dispatch.store.quarantine import Quarantine
from tests.support.fakes import SILICON
from tests.support.quarantines import GROUP, STARTED, TRIED, blamed, markers, run, start

# --- a process that crashes -------------------------------------------------------------------------------------------

CRASHES = {
    "abort": ("os.abort()", "Aborted"),
    "segfault": ("ctypes.string_at(0)", "Segmentation fault"),
    "in-c-code": ("ctypes.PyDLL(None).abort()", "Aborted"),
    "in-a-thread": ("t = threading.Thread(target=os.abort); t.start(); t.join()", "Aborted"),
}
DEATHS = {"kill": "os.kill(os.getpid(), 9)", "exit": "os._exit(3)"}


@pytest.mark.parametrize(("crash", "noted"), CRASHES.values(), ids=CRASHES)
def test_a_crash_quarantines_the_version(
    crash: str, noted: str, folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    code, _, error = run(folder, TRIED.format(crash))
    assert code < 0
    assert "Fatal Python error" not in error  # in the notes only
    assert len(markers(folder)) == 1
    found = anew().find("made_up", "1", GROUP)
    assert found is not None
    assert (found.kind, found.scope, found.title, found.strikes) == ("died", "", "dense 1 x 64", 1)
    assert found.reason == f"the process crashed while made_up 1 ran dense 1 x 64 for the first time ({noted})"
    (text,) = warnings()
    assert (
        text == f"{found.reason}{quarantine.until(found)}; `attn-dispatch doctor --lift made_up` lets it be tried again"
    )
    assert [path.suffix for path in place_of(folder, SILICON).iterdir()] == [".json"]
    assert anew().find("made_up", "1") == found
    assert anew().find("made_up", "2") is None
    assert len(warnings()) == 1
    assert anew().lift("made_up") == [found]
    assert anew().find("made_up", "1") is None


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_the_first_death_without_a_crash_excludes_nothing(
    death: str, folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    """Most such processes were ended from outside; the next one tries the version at once."""
    for number in (1, 2):
        run(folder, TRIED.format(death))
        quarantined = anew()
        found = quarantined.find("made_up", "1")
        assert (found is not None) is (number == 2)
        (entry,) = (*quarantined.entries(), *quarantined.strikes())
        assert (entry.kind, entry.strikes, entry.unsure) == ("died", 0, number)
    assert "the process died while made_up 1 ran dense 1 x 64 for the first time (killed, " in warnings()[0]
    assert "quarantined until" not in warnings()[0]
    assert [path.suffix for path in place_of(folder, SILICON).iterdir()] == [".json"]


def test_deaths_in_different_calls_exclude_nothing(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Kills from outside come at any moment; a backend's own exit comes in the same call each time."""
    trial = STARTED + "with crash_marker(folder, silicon, 'made_up', '1', 'x') as marker:\n    {}; os._exit(3)"
    race = "marker.pause(); marker.resume()"
    calls = ("marker.begin(9)", "marker.begin(9); marker.begin(9)", race, f"{race}; {race}", "pass")
    for call in calls:
        run(folder, trial.format(call))
        assert [each.unsure for each in anew().strikes()] == [1]
    run(folder, trial.format(calls[-1]))
    assert [each.unsure for each in anew().entries()] == [2]


def test_only_a_crash_counts_where_another_program_works(folder: Path, anew: Callable[[], Quarantine]) -> None:
    preparing = TRIED.replace("patience_s=3600", "crashes_only=True")
    run(folder, preparing.format("os.kill(os.getpid(), 9)"))
    assert blamed(anew()) == []
    assert markers(folder) == []
    run(folder, preparing.format("os.abort()"))
    assert blamed(anew()) == ["made_up"]


def test_the_programs_own_faulthandler_stays(folder: Path) -> None:
    """Also one that is enabled during a trial; what is enabled for a trial ends with it."""
    code = """
import faulthandler
with crash_marker(folder, silicon, "made_up", "1", "x"):
    print(faulthandler.is_enabled())
print(faulthandler.is_enabled())
with crash_marker(folder, silicon, "made_up", "1", "x"):
    faulthandler.enable()
print(faulthandler.is_enabled())
with crash_marker(folder, silicon, "made_up", "1", "x"):
    os.abort()
"""
    _, out, error = run(folder, STARTED + code)
    assert out == "True\nFalse\nTrue\n"
    assert error.startswith("Fatal Python error: Aborted")


def test_a_crash_in_a_group(folder: Path, anew: Callable[[], Quarantine]) -> None:
    run(folder, STARTED + f"with crash_marker(folder, silicon, 'made_up', None, 'x', {GROUP!r}): os.abort()")
    quarantined = anew()
    assert quarantined.find("made_up", None, GROUP) is not None
    assert quarantined.find("made_up", None) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exceptions_are_no_crash(error: type[BaseException], folder: Path, anew: Callable[[], Quarantine]) -> None:
    seen = []

    def fail() -> None:
        seen.extend(markers(folder))
        raise error

    with pytest.raises(error), crash_marker(folder, SILICON, "made_up", "1", "x"):
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
def test_a_regular_end_is_no_crash(ending: str, folder: Path) -> None:
    run(folder, TRIED.format(ending))
    assert place_of(folder, SILICON).is_dir()
    assert markers(folder) == []


def test_the_main_thread_may_end_before_a_trial(folder: Path, anew: Callable[[], Quarantine]) -> None:
    trial = """
def trial():
    with crash_marker(folder, silicon, "made_up", "1", "x"):
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
        *(("SIGTERM", patience, kind) for patience, kind in (("3600", None), ("None", None), ("0.01", "hung"))),
        *((number, "3600", None) for number in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU", "SIGQUIT")),
    ],
)
def test_a_stop_signal_is_no_crash(
    number: str, patience: str, kind: str | None, folder: Path, anew: Callable[[], Quarantine]
) -> None:
    """Within the patience of a trial a scheduler sent it; after that, the trial had hung."""
    trial = TRIED.replace("3600", patience).format(f"time.sleep(0.1); os.kill(os.getpid(), signal.{number})")
    code, _, _ = run(folder, trial)
    assert code == -signal.Signals[number]
    assert len(markers(folder)) == 1
    assert [each.kind for each in anew().strikes()] == [kind] * (kind is not None)
    assert anew().entries() == []
    assert markers(folder) == []


def test_a_late_call_is_one_that_ran_long(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Not a short one at the end of a long trial, nor one that is paused, nor another candidate of the race."""
    race = """
with crash_marker(folder, silicon, "slow", "1", "x", patience_s=0.05) as slow:
    with crash_marker(folder, silicon, "last", "1", "x", patience_s=0.05) as last:
        slow.pause(); last.pause()
        {}
        signal.raise_signal(signal.SIGTERM)
"""
    for calls in (
        "time.sleep(0.1)",
        "slow.resume(); time.sleep(0.1); slow.pause(); last.resume()",
        "time.sleep(0.1); slow.resume()",
        "slow.resume(); slow.begin(3600); time.sleep(0.1)",
    ):
        run(folder, STARTED + race.format(calls))
        assert len(markers(folder)) == 2
        assert blamed(anew()) == []
    run(folder, STARTED + race.format("slow.resume(); time.sleep(0.1)"))
    assert blamed(anew()) == ["slow"]


def test_a_suspended_process_has_not_run(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Told to stop after it, or killed. One thread alone: with several, the signals may come in the other order."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with start(folder, TRIED.replace("3600", "0.01").format("print(flush=True); time.sleep(60)")) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            if number == signal.SIGTERM:
                process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            if number == signal.SIGKILL:
                while b"most recent call" not in next(folder.rglob("*.notes")).read_bytes():
                    pass
                process.kill()
        assert blamed(anew()) == []
        assert markers(folder) == []


@pytest.mark.parametrize("stepped", ["boot", "clock"])
def test_times_mean_nothing_after_the_clock_was_set(
    stepped: str, folder: Path, anew: Callable[[], Quarantine], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, TRIED.replace("3600", "0.01").format("time.sleep(0.1); signal.raise_signal(signal.SIGTERM)"))
    real = signal_notes._clocks

    def clocks(boot: str) -> signal_notes.Clocks:
        found = real(boot)
        return signal_notes.Clocks("another", found.offset_s) if stepped == "boot" else signal_notes.Clocks(boot, 0.0)

    monkeypatch.setattr(signal_notes, "_clocks", clocks)
    assert blamed(anew()) == []
    assert markers(folder) == []


def test_a_process_killed_before_its_first_marker_leaves_nothing(folder: Path, anew: Callable[[], Quarantine]) -> None:
    code = "from attn_dispatch.store import crash_markers\nos.write = lambda *_: os.kill(os.getpid(), 9)\n"
    run(folder, STARTED + code + "with crash_marker(folder, silicon, 'made_up', '1', 'x'): pass")
    assert len(list(folder.rglob("*.notes"))) == 1
    assert blamed(anew()) == []
    assert list(folder.rglob("*.notes")) == []


def test_a_child_of_multiprocessing_may_end_before_a_trial(folder: Path) -> None:
    """It ends by os._exit."""
    code = """
import multiprocessing

def trial():
    with crash_marker(folder, silicon, "made_up", "1", "x"):
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


def test_the_last_resort_is_never_quarantined(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """There would be nothing else to run."""
    assert quarantine.LAST_RESORT == LAST_RESORT
    code, _, _ = run(folder, TRIED.replace("made_up", LAST_RESORT).format("os.abort()"))
    assert code != 0
    assert len(markers(folder)) == 1
    assert anew().entries() == []
    assert markers(folder) == []


def test_a_stop_signal_in_c_code_that_holds_the_interpreter_lock(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Python's own handlers would not run there."""
    with start(
        folder, TRIED.replace("3600", "0.1").format("print(flush=True); ctypes.PyDLL(None).sleep(60)")
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.terminate()
    assert [each.kind for each in anew().strikes()] == ["hung"]


def test_handlers_of_other_code_are_not_replaced(folder: Path) -> None:
    """Handlers set in Python, which may call C code's, and handlers that only C code has set."""
    code = """
import faulthandler
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
dump = open(folder.parent / "dump", "w+")
faulthandler.register(signal.SIGHUP, file=dump)
with crash_marker(folder, silicon, "made_up", "1", "x"):
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    print(len(next(folder.rglob("*.notes")).read_text().splitlines()))
os.kill(os.getpid(), signal.SIGHUP)
print((folder.parent / "dump").read_text().count("most recent call first"))
"""
    assert run(folder, STARTED + code) == (0, "handled\n1\n2\n", "")


def test_a_handler_set_during_a_trial_stays(folder: Path) -> None:
    """As by another thread: without it, a later alarm would end the process. Later trials record signals again."""
    code = """
with crash_marker(folder, silicon, "made_up", "1", "x"):
    signal.signal(signal.SIGALRM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGALRM)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
with crash_marker(folder, silicon, "made_up", "1", "x"):
    os.kill(os.getpid(), signal.SIGALRM)
"""
    assert run(folder, STARTED + code) == (-signal.SIGALRM, "handled\n", "")
    assert [found.noted.stopped for found in abandoned(place_of(folder, SILICON))] == [True]


def test_signals_end_the_process_as_before(folder: Path) -> None:
    code = """
with crash_marker(folder, silicon, "made_up", "1", "x"):
    with crash_marker(folder, silicon, "made_up", "2", "x"):
        pass
    inside = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
print(int(inside, 16) >> 14 & 1, int(open("/proc/self/status").read().split("SigCgt:")[1].split()[0], 16) >> 14 & 1)
"""
    assert run(folder, STARTED + code) == (0, "1 0\n", "")


# --- processes that run on --------------------------------------------------------------------------------------------


@pytest.fixture
def trying(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a trial."""
    with start(folder, TRIED.format("print(flush=True); time.sleep(60)")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_running_trial_is_no_crash(
    trying: subprocess.Popen[str], folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    with crash_marker(folder, SILICON, "mine", "1", "x"):
        quarantined = anew()
        assert quarantined.entries() == []
        assert len(markers(folder)) == 2
    trying.kill()
    trying.wait()
    assert blamed(quarantined) == []
    assert [each.backend for each in quarantined.sweep()] == ["made_up"]
    assert blamed(quarantined) == ["made_up"]
    assert len(warnings()) == 1


def test_a_forked_child_does_not_hold_the_lock_of_the_marker(folder: Path, anew: Callable[[], Quarantine]) -> None:
    forking = "os.fork() or print(os.getpid(), flush=True); time.sleep(60)"
    with start(folder, TRIED.format(forking)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            assert blamed(anew()) == ["made_up"]
        finally:
            os.kill(child, signal.SIGKILL)  # fails if there was no child


def test_a_forked_child_does_not_remove_the_marker(folder: Path) -> None:
    code = """
with crash_marker(folder, silicon, "made_up", "1", "x"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(len(list(folder.rglob("*.mark"))))
if not child:
    with crash_marker(folder, silicon, "made_up", "2", "x"):
        os.abort()
"""
    assert run(folder, STARTED + code) == (0, "2\n", "")
    assert [each.version for each in Quarantine(folder, SILICON).sweep()] == ["2"]


def test_concurrent_sweeps_of_markers(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """A second sweep during the first must not take the first one's lock for the backend's."""
    run(folder, TRIED.format("os.abort()"))
    place = place_of(folder, SILICON)
    seen = []
    for first in abandoned(place):
        for second in abandoned(place):
            seen.append(second)
        os.unlink(first.path)
        assert list(abandoned(place)) == []
    assert [each.marker.backend for each in seen] == ["made_up"]


def test_concurrent_processes_all_find_the_entries(folder: Path) -> None:
    for version in "1234":
        run(folder, TRIED.replace('"1"', f'"{version}"').format("os.abort()"))
    finding = """
while not (folder / "go").exists():
    pass
print(*(Quarantine(folder, silicon).find("made_up", version).kind for version in "1234"))
"""
    processes = [start(folder, STARTED + finding) for _ in range(4)]
    (folder / "go").touch()
    for process in processes:
        with process:
            assert process.communicate(timeout=60)[0] == "died died died died\n"
    assert markers(folder) == []
    assert len(list(place_of(folder, SILICON).iterdir())) == 4
