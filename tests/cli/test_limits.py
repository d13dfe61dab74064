"""`attn-dispatch limits`: the search with made-up processes, and with real ones under a limit of memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.cli import limited, longest
from attn_dispatch.cli.limited import Attempt
from attn_dispatch.cli.longest import Search, Tried, find_longest
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tests.support.calls import Plugin
from tests.support.commands import command, plain
from tests.support.fakes import raising

ROOM = 64 << 20
Answer = Callable[[int], dict[str, Any]]


def problem_at(tokens: int) -> Problem:
    return problem_of((1, tokens, 2, 16), Dense(is_causal=True), torch.float32, torch.device("cpu"))


def attempt(**more: Any) -> Attempt:
    made = Attempt(problem_at(64), problem_at(32), "manual", "natural", ROOM, ROOM, 30.0)
    return made._replace(**more)


def ran(seconds: float = 1e-3) -> dict[str, Any]:
    return {"status": "ran", "seconds": seconds, "peak_bytes": 10, "above_bytes": 1}


def died(tokens: int) -> dict[str, Any]:
    return {"status": "died", "reason": "its process ended: signal 9"}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[Attempt]]:
    """In place of `run_alone`: what `answer` says of a length. Returns what is tried."""

    def install(answer: Answer = lambda _: ran()) -> list[Attempt]:
        found: list[Attempt] = []

        def run_alone(each: Attempt) -> dict[str, Any]:
            found.append(each)
            return answer(each.problem.q_len)

        monkeypatch.setattr(longest, "run_alone", run_alone)
        return found

    return install


def search(start: int = 1024, most: int = 2**40, **more: Any) -> Search:
    found = Search(problem_at, start, most, **{"backend": "sdpa", "memory_bytes": ROOM, "max_seconds": 30.0, **more})
    found.run()
    return found


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


def test_a_limit_of_memory(processes: Any) -> None:
    tried = processes(lambda n: ran() if n <= 20_000 else {"status": "memory", "reason": "out of memory"})
    found = search()
    assert found.longest == Tried(18_432, "sdpa", "ran", seconds=1e-3, peak_bytes=10, above_bytes=1)
    assert found.stopped_by == Tried(20_480, "sdpa", "memory", "out of memory")
    assert found.estimate is not None
    assert len(tried) == len(found.tried)
    assert all(each.first is not None and each.first.q_len == longest.WARM_TOKENS for each in tried)


def test_without_room_no_process_is_started(processes: Any) -> None:
    tried, found = processes(), search(memory_bytes=500)  # a token takes 512
    assert (tried, found.longest, found.estimate) == ([], None, None)
    assert found.stopped_by is not None
    assert found.stopped_by.tokens == 1024
    assert found.stopped_by.reason.startswith("by estimate, not tried: q, k, v and out take 512.0 KiB")


def test_a_length_that_would_take_too_long_is_not_tried(processes: Any) -> None:
    """Dense attention takes four times as long for twice the length."""
    tried, found = processes(lambda n: ran((n / 1024) ** 2)), search(max_seconds=20.0)
    assert max(each.problem.q_len for each in tried) == 4096
    assert found.stopped_by is not None
    assert (found.stopped_by.status, found.stopped_by.tokens) == ("time", 4608)
    assert "by estimate, not tried: would take 20.2 s" in found.stopped_by.reason


@pytest.mark.parametrize(("backend", "how"), [("sdpa", "died: its process"), ("flash", "refused: none of flash-attn")])
def test_a_backend_that_always_fails_is_left(backend: str, how: str, processes: Any) -> None:
    tried, found = processes(died), search(backend=backend)
    assert [each.problem.q_len for each in tried] == ([1024, 512] if how.startswith("died") else [])
    assert (found.longest, [each.tokens for each in found.tried]) == (None, [1024, 512])
    assert found.stopped_by == found.tried[0]
    assert f"{found.tried[0].status}: {found.tried[0].reason}".startswith(how)


# --- a process --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("serve = lambda: os.write(1, BEGUN) and time.sleep(60)", ("time", "did not end within 0.1 s each")),
        ("serve = lambda: os.kill(os.getpid(), 9)", ("died", "its process ended before the call: signal 9")),
        ("serve = lambda: os.write(1, BEGUN) and os._exit(3)", ("died", "its process ended: code 3")),
    ],
)
def test_what_ends_a_process_is_the_reason(
    code: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "import faulthandler, os, sys, time\nfaulthandler.dump_traceback_later(0.5, exit=True, file=sys.stdout)"
    program = f"{ended}\nBEGUN = {limited.BEGUN!r}\n{code}\nserve()"
    monkeypatch.setattr(limited, "PROGRAM", program.replace("{", "{{").replace("}", "}}"))
    found = limited.run_alone(attempt(max_seconds=0.1))
    assert found["status"] == expected[0]
    assert expected[1] in found["reason"]


@pytest.mark.parametrize(
    ("error", "status"), [(ImportError("no libcudart"), "failed"), (MemoryError("all taken"), "memory")]
)
def test_an_error_before_the_call_is_told(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Backend:
        raise error

    monkeypatch.setattr(registry, "load", load)
    found = limited.outcome(attempt(), lambda: pytest.fail("begun"))
    assert found["status"] == status
    assert str(error) in found["reason"] + found.get("detail", "")


def test_a_peak_over_the_limit_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_limited", lambda *_: True)
    for over, status in ((0, "ran"), (1, "memory")):
        measured = {**ran(), "peak_bytes": 2**20 + over}
        monkeypatch.setattr(limited, "_measured", lambda *_, measured=measured: measured)
        assert limited.outcome(attempt(memory_bytes=2**20), lambda: None)["status"] == status


def test_without_a_limit_only_what_is_declared_to_fit_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_limited", lambda *_: False)
    assert limited.outcome(attempt(), lambda: None)["status"] == "ran"
    assert limited.outcome(attempt(declared_bytes=ROOM + 1), lambda: None)["status"] == "memory"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "said"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("CUDA is gone"), "CUDA is gone")]
)
def test_what_was_found_is_printed_after_an_interruption_or_an_error(
    end: BaseException, said: str, tmp_path: Path, processes: Any
) -> None:
    processes(lambda n: ran() if n <= 2048 else raising(end)())
    arguments = ("limits", "--shape", "1,2k,2,16", "--backend", "sdpa", "--device", "cpu")
    done, again = command(tmp_path, *arguments), command(tmp_path, *arguments, "--json")
    assert done.returncode == again.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sdpa "))
    assert "2,048" in line
    assert line.endswith("   not finished")
    found = json.loads(again.stdout)
    assert found["interrupted"] == (said == "interrupted")
    assert ("CUDA" in (found["error"] or "")) == ("CUDA" in said)
    assert not found["limits"][0]["complete"]
    assert found["limits"][0]["longest"]["tokens"] == 2048


def test_a_row_for_each_combination_and_backend(tmp_path: Path, processes: Any) -> None:
    processes()
    given = ("limits", "--lengths", "64:128", "--device", "cpu", "--json")
    rows = plain(command(tmp_path, *given, "--causal", "both", "--dtype", "fp32,bf16"))["limits"]
    assert [(each["longest"]["tokens"], each["stopped_by"]) for each in rows] == [(128, None)] * 4
    assert len({each["title"] for each in rows}) == 4
    every = plain(command(tmp_path, *given, "--backend", "all"), 1)
    found = {each["forced"]: each["longest"] for each in every["limits"]}
    assert found["flash"] is None
    assert found["manual"]["tokens"] == 128


@pytest.mark.parametrize(("lengths", "last"), [("1000:5000", 5000), ("1k:6k", 6144), ("300,1000,700", 1000)])
def test_the_end_of_the_range_is_tried(lengths: str, last: int, tmp_path: Path, processes: Any) -> None:
    """It is no power of two times the start."""
    processes()
    given = ("--lengths", lengths, "--device", "cpu", "--backend", "sdpa", "--json")
    (row,) = plain(command(tmp_path, "limits", *given))["limits"]
    assert (row["longest"]["tokens"], row["stopped_by"]) == (last, None)


class Odd(Plugin):
    def workspace_bytes(self, problem: Problem) -> int:
        raise ZeroDivisionError


def test_a_broken_plug_in_costs_its_own_row_only(processes: Any) -> None:
    processes()
    registry.register(Odd(name="odd"))
    found = search(64, 128, backend="odd").stopped_by
    assert found is not None
    assert (found.status, found.reason.partition(": ")[0]) == ("failed", "workspace_bytes")


def test_a_guess_is_called_one(tmp_path: Path, processes: Any) -> None:
    processes()
    given = ("limits", "--lengths", "64:128", "--device", "cpu")
    assert "may take another backend" in command(tmp_path, *given).stdout
    assert "may take another backend" not in command(tmp_path, *given, "--backend", "manual").stdout
    assert plain(command(tmp_path, *given, "--json"))["limits"][0]["guessed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "8"), "expected bytes such as 8GiB"),
        (("--memory", "9000TiB"), "--memory may be"),
        (("--max-seconds", "0"), "expected a number > 0"),
        (("--backend", "nope"), "backend must be None or one of"),
        (("--segments", "64"), "--segments and --dilations go together"),
        (("--shape", "1,64,2,16", "--shape", "1,64,3/2,16"), "must divide"),  # before the first search
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], words: str, tmp_path: Path, processes: Any) -> None:
    tried, done = processes(), command(tmp_path, "limits", *arguments, "--device", "cpu")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert tried == []
