"""`attn-dispatch limits`: the search with made-up processes, and with real ones under a limit of memory."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.cli import limited, longest
from attn_dispatch.cli.longest import Search, Tried, find_longest
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.machine.child import Outcome
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tests.support.commands import command, plain

ROOM = 64 << 20
Answer = Callable[[int], Outcome]


def problem_at(tokens: int) -> Problem:
    return problem_of((1, tokens, 2, 16), Dense(is_causal=True), torch.float32, torch.device("cpu"))


def ran(seconds: float = 1e-3) -> Outcome:
    return Outcome(True, {"status": "ran", "seconds": seconds, "peak_bytes": 10, "above_bytes": 1})


def out_of_memory() -> Outcome:
    return Outcome(True, {"status": "memory", "reason": "out of memory"})


class Processes:
    """In place of `run_alone`: what `answer` says of a length."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.lengths: list[int] = []

    def run_alone(
        self, module: str, function: str, args: tuple[Any, ...], *, start_s: float, limit_s: float
    ) -> Outcome:
        assert callable(getattr(sys.modules[module], function))
        assert min(start_s, limit_s) > args[-1]
        problem = args[1]
        self.lengths.append(problem.q_len)
        return self.answer(problem.q_len)


def search(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, start: int = 1024, most: int = 2**40, **more: Any
) -> tuple[Search, list[int]]:
    processes = Processes(answer)
    monkeypatch.setattr(longest, "run_alone", processes.run_alone)
    found = Search(problem_at, start, most, **{"backend": "sdpa", "memory_bytes": ROOM, "max_seconds": 30.0, **more})
    found.run()
    return found, processes.lengths


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 7, 1024, 5000])
@pytest.mark.parametrize("limit", [1, 9, 1024, 12_345, 1_000_000])
def test_the_longest_is_found_to_an_eighth(limit: int, start: int) -> None:
    tried: list[int] = []

    def runs(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    found = find_longest(runs, start, 2**40)
    assert found is not None
    assert found <= limit < found + max(2, found // longest.RESOLUTION + 1)
    assert len(set(tried)) == len(tried) < 30
    assert max(tried) <= max(start, 2 * limit)  # nothing above a length that did not run


def test_bounds_and_nothing() -> None:
    assert find_longest(lambda _: False, 1024, 2**40) is None
    assert find_longest(lambda _: True, 1024, 5000) == 5000


def test_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lengths = search(monkeypatch, lambda n: ran() if n <= 20_000 else out_of_memory())
    assert found.longest == Tried(18_432, "sdpa", "ran", seconds=1e-3, peak_bytes=10, above_bytes=1)
    assert found.stopped_by == Tried(20_480, "sdpa", "memory", "out of memory")
    assert found.estimate is not None
    assert len(lengths) == len(found.tried)


def test_without_room_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lengths = search(monkeypatch, lambda _: ran(), memory_bytes=500)  # a token takes 512
    assert lengths == []
    assert found.longest is None
    assert found.estimate is None
    assert found.stopped_by is not None
    assert found.stopped_by.tokens == 1024
    assert found.stopped_by.reason.startswith("by estimate, not tried: q, k, v and out take 512.0 KiB")


def test_a_length_that_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense attention, four times as long for twice the length."""
    found, lengths = search(monkeypatch, lambda n: ran((n / 1024) ** 2), max_seconds=20.0)
    assert max(lengths) == 4096
    assert found.stopped_by is not None
    assert (found.stopped_by.status, found.stopped_by.tokens) == ("time", 4608)
    assert "by estimate, not tried: would take 20.2 s" in found.stopped_by.reason


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Outcome(True), "time", "did not end within"),
        (Outcome(False), "failed", "did not start"),
        (Outcome(True, code=-signal.SIGKILL), "died", "signal 9 SIGKILL"),
        (Outcome(False, code=1), "failed", "before the call, code 1"),
        (Outcome(True, {"status": "failed", "reason": "ValueError: odd"}), "failed", "ValueError: odd"),
    ],
)
def test_what_ends_a_process_is_the_reason(
    outcome: Outcome, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = search(monkeypatch, lambda n: ran() if n < 2048 else outcome)
    assert found.stopped_by is not None
    assert found.stopped_by.status == status
    assert words in found.stopped_by.reason
    assert found.longest is not None
    assert 1024 <= found.longest.tokens < 2048


@pytest.mark.parametrize(
    ("backend", "lengths", "tried", "status"),
    [("sdpa", [1024, 512, 256], 3, "died"), ("flash", [], 2, "refused")],  # another length has the same refusal
)
def test_a_backend_that_always_fails_is_left(
    backend: str, lengths: list[int], tried: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = search(monkeypatch, lambda _: Outcome(True, code=3), backend=backend)
    assert seen == lengths
    assert found.longest is None
    assert found.stopped_by is not None
    assert (found.stopped_by.status, found.stopped_by.tokens, len(found.tried)) == (status, 1024, tried)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit of address space")
def test_a_length_above_really_fails_under_the_limit(tmp_path: Path) -> None:
    """A dense mask in float32: 16 MiB at 2048 tokens, 64 MiB at 4096; q, k, v and out are 2 MiB."""
    arguments = ("--shape", "1,2k,2,16", "--window", "100", "--device", "cpu", "--backend", "sdpa_mask")
    done = command(tmp_path, "limits", *arguments, "--memory", "48MiB", "--json")
    (row,) = plain(done)["limits"]
    assert 2048 <= row["longest"]["tokens"] < 4096
    assert 16 << 20 < row["longest"]["peak_bytes"] < 64 << 20
    assert row["longest"]["tokens_per_s"] > 0
    assert row["stopped_by"]["status"] == "memory"
    failed = [each for each in row["tried"] if each["reason"] == "out of memory under 48.0 MiB"]
    assert failed
    assert "memory" in failed[0]["detail"]
    assert "2,048 tokens with sdpa_mask: " in done.stderr
    assert not list(tmp_path.glob("v2/*/*/*.json"))


def interrupt() -> Outcome:
    raise KeyboardInterrupt


def terminate() -> Outcome:
    os.kill(os.getpid(), signal.SIGTERM)
    return ran()


def fail() -> Outcome:
    raise RuntimeError("CUDA is gone")


@pytest.mark.parametrize(
    ("end", "said"), [(interrupt, "interrupted"), (terminate, "interrupted"), (fail, "CUDA is gone")]
)
def test_what_was_found_is_printed_after_an_interruption_or_an_error(
    end: Callable[[], Outcome], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(*_: object) -> None:
        raise AssertionError("the command does not handle it")

    monkeypatch.setattr(longest, "run_alone", Processes(lambda n: ran() if n <= 2048 else end()).run_alone)
    arguments = ("limits", "--shape", "1,2k,2,16", "--backend", "sdpa", "--device", "cpu")
    before = signal.signal(signal.SIGTERM, otherwise)
    try:
        done, again = command(tmp_path, *arguments), command(tmp_path, *arguments, "--json")
        assert signal.getsignal(signal.SIGTERM) is otherwise
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.returncode == again.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sdpa "))
    assert "2,048" in line
    assert line.endswith("   not finished")
    found = json.loads(again.stdout)
    assert found["interrupted"] == (said == "interrupted")
    assert ("CUDA" in (found["error"] or "")) == (end is fail)
    assert not found["limits"][0]["complete"]
    assert found["limits"][0]["longest"]["tokens"] == 2048


def test_a_row_for_each_combination_and_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "run_alone", Processes(lambda _: ran()).run_alone)
    given = ("--lengths", "64:128", "--causal", "both", "--dtype", "fp32,bf16", "--device", "cpu")
    rows = plain(command(tmp_path, "limits", *given, "--json"))["limits"]
    assert [each["longest"]["tokens"] for each in rows] == [128] * 4
    assert [each["stopped_by"] for each in rows] == [None] * 4
    assert len({each["title"] for each in rows}) == 4
    every = plain(
        command(tmp_path, "limits", "--lengths", "64:128", "--device", "cpu", "--backend", "all", "--json"), 1
    )
    found = {each["forced"]: each["longest"] for each in every["limits"]}
    assert found["flash"] is None
    assert found["manual"]["tokens"] == 128


@pytest.mark.parametrize(("lengths", "last"), [("1000:5000", 5000), ("1k:6k", 6144), ("300,1000,700", 1000)])
def test_the_end_of_the_range_is_tried(
    lengths: str, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no power of two times the start."""
    monkeypatch.setattr(longest, "run_alone", Processes(lambda _: ran()).run_alone)
    given = ("--lengths", lengths, "--device", "cpu", "--backend", "sdpa", "--json")
    (row,) = plain(command(tmp_path, "limits", *given))["limits"]
    assert row["longest"]["tokens"] == last
    assert row["stopped_by"] is None


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package `made_up`; returns the path of the module that is its backend."""
    folder = tmp_path / "packages"
    info = folder / "made_up-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nmade_up = made_up\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)  # found anew in every call
    yield folder / "made_up.py"
    registry._load.cache_clear()
    sys.modules.pop("made_up", None)


BACKEND = """
name = "made_up"
def version(): return "1"
def refusals(problem): return []
def workspace_bytes(problem): {body}
def run(*args, **more): raise RuntimeError("not run here")
"""


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import missing_library", "refused", "cannot be loaded: ModuleNotFoundError"),
        (BACKEND.format(body="raise ZeroDivisionError"), "failed", "workspace_bytes: ZeroDivisionError"),
        (BACKEND.format(body="return None"), "failed", "workspace_bytes: TypeError"),
    ],
)
def test_a_broken_plug_in_costs_its_own_row_only(
    code: str, status: str, words: str, plug_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in.write_text(code, encoding="utf-8")
    monkeypatch.setattr(longest, "run_alone", Processes(lambda _: ran()).run_alone)
    given = ("--lengths", "64:128", "--device", "cpu", "--backend", "all", "--json")
    rows = {each["forced"]: each for each in plain(command(tmp_path, "limits", *given), 1)["limits"]}
    assert rows["manual"]["longest"]["tokens"] == 128
    stopped = rows["made_up"]["stopped_by"]
    assert stopped["status"] == status
    assert words in stopped["reason"]


def test_all_problems_are_checked_before_the_first_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(lambda _: ran())
    monkeypatch.setattr(longest, "run_alone", processes.run_alone)
    shapes = ("--shape", "1,64,2,16", "--shape", "1,64,3/2,16")
    done = command(tmp_path, "limits", *shapes, "--device", "cpu", "--backend", "sdpa")
    assert done.returncode == 2, done.stderr
    assert processes.lengths == []


@pytest.mark.parametrize(
    ("error", "status"), [(ImportError("no libcudart"), "failed"), (MemoryError("all taken"), "memory")]
)
def test_an_error_before_the_call_has_its_text(
    error: Exception, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Backend:
        raise error

    monkeypatch.setattr(limited, "OOM_SCORE", tmp_path / "score")
    monkeypatch.setattr(limited, "end_with", lambda _: None)
    monkeypatch.setattr(registry, "load", load)
    found = limited.run_limited(lambda: pytest.fail("begun"), 0, problem_at(8), None, "sdpa", "natural", ROOM, 1, 9.0)
    assert found["status"] == status
    assert found["reason"] == f"before the call: {type(error).__name__}: {error}"


def test_a_peak_over_the_limit_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "OOM_SCORE", tmp_path / "score")
    monkeypatch.setattr(limited, "end_with", lambda _: None)
    monkeypatch.setattr(limited, "_limited", lambda *_: True)
    for over, status in ((0, "ran"), (1, "memory")):
        measured = {"status": "ran", "seconds": 1.0, "peak_bytes": 2**20 + over, "above_bytes": 0}
        monkeypatch.setattr(limited, "_measured", lambda *_, measured=measured: measured)
        found = limited.run_limited(lambda: None, 0, problem_at(8), None, "manual", "natural", 2**20, 1, 9.0)
        assert found["status"] == status


def test_a_guess_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "run_alone", Processes(lambda _: ran()).run_alone)
    given = ("limits", "--lengths", "64:128", "--device", "cpu")
    assert "may take another backend" in command(tmp_path, *given).stdout
    assert "may take another backend" not in command(tmp_path, *given, "--backend", "manual").stdout
    assert plain(command(tmp_path, *given, "--json"))["limits"][0]["guessed"]


@pytest.mark.parametrize(("tokens", "warm"), [(64, 32), (65, 64), (4096, 64), (8, 4), (1, None)])
def test_no_call_of_the_whole_problem_without_a_limit(
    tokens: int, warm: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: list[Problem | None] = []

    def run_alone(module: str, function: str, args: tuple[Any, ...], **limits: float) -> Outcome:
        firsts.append(args[2])
        return ran()

    monkeypatch.setattr(longest, "run_alone", run_alone)
    Search(problem_at, tokens, tokens, "sdpa", ROOM, 30.0).run()
    assert [each and each.q_len for each in firsts] == [warm]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "8"), "expected bytes such as 8GiB"),
        (("--memory", "0GiB"), "expected bytes such as 8GiB"),
        (("--memory", "9000TiB"), "--memory may be"),
        (("--max-seconds", "0"), "expected a number > 0"),
        (("--backend", "nope"), "backend must be None or one of"),
        (("--segments", "64"), "--segments and --dilations go together"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = command(tmp_path, "limits", *arguments, "--device", "cpu")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
