"""A process of its own: what ends it ends nothing else, and is told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from attn_dispatch.machine.child import Outcome, run_alone

MODULE = "tests.support.alone"
PATIENT_S = 60.0


def pid(given: object = None) -> list[object]:
    found = run_alone(MODULE, "pid", (given,), start_s=PATIENT_S, limit_s=PATIENT_S)
    assert found.begun
    assert found.code is None
    value: list[object] = found.value
    return value


def dies(at: str, how: str, **limits: float) -> Outcome:
    return run_alone(MODULE, "dies", (at, how), **{"start_s": PATIENT_S, "limit_s": PATIENT_S, **limits})


def test_it_has_the_variables_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TEST", "x")
    other, given, variable = pid(["a", 1])
    assert other != os.getpid()
    assert (given, variable) == (["a", 1], "x")


def test_it_ends_with_its_answer() -> None:
    """It would take memory of a device that the program needs."""
    found = pid()[0]
    assert isinstance(found, int)
    with pytest.raises(ProcessLookupError):
        os.kill(found, 0)


@pytest.mark.parametrize(
    ("at", "how", "expected"),
    [
        ("early", "raises", Outcome(False, code=1)),
        ("later", "raises", Outcome(True, code=1)),
        ("later", "exits", Outcome(True, code=3)),
        ("later", "SIGSEGV", Outcome(True, code=-signal.SIGSEGV)),
        ("early", "SIGKILL", Outcome(False, code=-signal.SIGKILL)),
    ],
)
def test_its_end_is_told(at: str, how: str, expected: Outcome) -> None:
    assert dies(at, how) == expected


@pytest.mark.parametrize(("at", "limits"), [("early", {"start_s": 0.05}), ("later", {"limit_s": 0.05})])
def test_one_that_takes_too_long_is_killed(at: str, limits: dict[str, float]) -> None:
    assert dies(at, "hangs", **limits) == Outcome(at == "later")


def test_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="nowhere"):
        pid()
    assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import os, time
from attn_dispatch.machine.child import end_with
parent = os.getpid()
if os.fork() == 0:
    {wait}
    end_with(parent)
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends it")
def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT.format(wait="")], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        start = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == ""  # the end of the pipe, which the child holds too
        assert time.monotonic() - start < PATIENT_S / 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends it")
def test_it_ends_if_its_parent_has_ended_before() -> None:
    code = PARENT.format(wait="time.sleep(1)").replace("time.sleep(60)", "os._exit(0)")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.stdout == ""
