"""Processes that end in a trial leave a marker, which becomes a strike; those that end otherwise, or run on, do not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from attn_dispatch import system
from attn_dispatch.store import quarantine
from attn_dispatch.store.quarantine import Quarantine, crash_marker, place_of
from tests.support import processes
from tests.support.fakes import SILICON, raising
from tests.support.quarantines import GROUP, TRIED, abandon, blamed, markers, run, start

NOW = datetime.now(UTC)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("death", ["ctypes.string_at(0)", "os._exit(3)"], ids=["segfault", "exit"])
def test_a_crasher_is_out_after_two_deaths(
    death: str, folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    for number in (1, 2):
        code, _, error = run(folder, TRIED.format(death))
        assert (code == 0, error) == (False, "")
        assert len(markers(folder)) == 1
        found = anew().find("made_up", "1", GROUP)
        assert (found is not None) is (number == 2)
    assert found is not None
    assert (found.kind, found.scope, found.title, found.strikes) == ("died", "", "dense 1 x 64", 2)
    assert warnings()[0] == (
        "the process ended while made_up 1 ran dense 1 x 64 for the first time (crashed, killed or stopped)"
    )
    assert [path.suffix for path in place_of(folder, SILICON).iterdir()] == [".json"]
    assert anew().find("made_up", "2") is None
    assert len(warnings()) == 2
    assert anew().lift("made_up") == [found]


KILLED = """
import os, random, sys, time
from pathlib import Path

import torch

from attn_dispatch import Dilated, Window, attend, process_state
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.quarantine import Quarantine

torch.set_num_threads(1)
attend(*torch.randn(3, 1, 32, 2, 16))  # loads and compiles what every child needs


def trials(seed):
    chance = random.Random(seed)
    while True:
        x = torch.randn(1, chance.randrange(64, 512), 2, 16)
        attend(x, x, x, chance.choice([None, Window(32, 0), Dilated((32, 64), (1, 2))]))


chance, struck = random.Random(0), set()
for seed in range(30):
    child = os.fork()
    if not child:
        trials(seed)
    time.sleep(chance.uniform(0.0, 0.6))
    os.kill(child, 9)
    os.waitpid(child, 0)
    process_state.forget(process_state.READ)
    found = Quarantine(cache_folder(), silicon("cpu"))
    for each in (*found.entries(), *found.strikes()):
        struck.add(each.backend)
        assert each.hold.total_seconds() <= 600, each
print(len(struck))
"""


@pytest.mark.full
def test_random_kills_exclude_no_backend_for_longer_than_ten_minutes() -> None:
    done = processes.run(KILLED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "some kills were in a trial"


@pytest.mark.parametrize(
    "ending",
    [
        "raise ValueError",
        "sys.exit(3)",
        "signal.raise_signal(signal.SIGINT)",
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "marker.pause(); os._exit(3)",
    ],
)
def test_other_ends_are_no_strike(ending: str, folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Exceptions, the end of the main thread, and an end while the trial pauses."""
    run(folder, TRIED.replace('64"):', '64") as marker:').format(ending))
    assert place_of(folder, SILICON).is_dir()
    assert blamed(anew()) == []
    assert [path.stat().st_size for path in markers(folder)] == [0] * ("pause" in ending)


@pytest.fixture
def trying(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a trial."""
    with start(folder, TRIED.format("print(flush=True); time.sleep(60)")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_running_trial_is_no_strike(
    trying: subprocess.Popen[str], folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    with crash_marker(folder, SILICON, "mine", "1", "x") as marker:
        marker.pause()
        marker.resume()
        assert blamed(quarantined := anew()) == []
        assert len(markers(folder)) == 2
    trying.kill()
    trying.wait()
    assert blamed(quarantined) == []
    assert [each.backend for each in quarantined.sweep()] == ["made_up"]
    assert blamed(quarantined) == ["made_up"]
    assert len(warnings()) == 1


def test_a_forked_child_neither_holds_nor_removes_the_marker(folder: Path, anew: Callable[[], Quarantine]) -> None:
    forking = """
    child = os.fork()
    if child:
        os.write(1, b"%d\\n" % child)
        time.sleep(60)
if not child:
    os.write(1, b"%d\\n" % len(list(folder.rglob("*.mark"))))
    time.sleep(60)
"""
    with start(folder, TRIED.format(forking.strip())) as process:
        assert process.stdout is not None
        numbers = sorted(int(process.stdout.readline()) for _ in range(2))
        process.kill()
        process.wait()
        try:
            assert numbers[0] == 1
            assert blamed(anew()) == ["made_up"]
        finally:
            os.kill(numbers[1], signal.SIGKILL)


def test_concurrent_sweeps(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """A second sweep during the first takes no lock of the first for the trial's, and adds no strike."""
    abandon(folder, NOW)
    first = quarantine.abandoned(folder, SILICON)
    assert next(first)[1].backend == "made_up"
    assert blamed(anew()) == ["made_up"]
    assert list(first) == []
    assert [each.strikes for each in anew().strikes()] == [1]


def test_without_locks_markers_are_abandoned_after_an_hour(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], Quarantine]
) -> None:
    monkeypatch.setattr(system, "lock", raising(OSError(errno.ENOLCK, "No locks available")))
    with crash_marker(folder, SILICON, "mine", "1", "x"):
        left = abandon(folder, NOW)
        assert blamed(anew()) == []
        os.utime(left, (0, time.time() - 3700))
        assert blamed(anew()) == ["made_up"]
        assert len(markers(folder)) == 1
    assert markers(folder) == []


def test_an_empty_marker_blames_nobody(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Its process may be about to lock it; after an hour it is removed."""
    path = abandon(folder, NOW)
    path.write_bytes(b"")
    for age_s, left in ((0.0, [path]), (3700.0, [])):
        os.utime(path, (0, time.time() - age_s))
        assert blamed(anew()) == []
        assert markers(folder) == left


def test_a_death_that_cannot_be_recorded_stays_as_a_marker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], Quarantine]
) -> None:
    abandon(folder, NOW)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", raising(FULL))
        for _ in range(2):
            assert blamed(anew()) == ["made_up"]
    assert len(markers(folder)) == 1
    assert blamed(anew()) == ["made_up"]
    assert markers(folder) == []


@pytest.mark.parametrize("target", ["os.write", "pathlib.Path.mkdir", "os.open"])
def test_a_trial_runs_if_its_marker_cannot_be_written(
    target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    entered = 0
    with monkeypatch.context() as patch:
        patch.setattr(target, raising(FULL))
        for _ in range(2):
            with crash_marker(folder, SILICON, "made_up", "1", "x") as marker:
                marker.pause()
                marker.resume()
                entered += 1
    assert entered == 2
    assert markers(folder) == []
    assert quarantine._own_markers == {}
    (text,) = warnings()
    assert text.startswith("a crash would not be recorded: ")
