"""When a call measures and when it uses a stored decision: modes, budgets, the cache folder, stale decisions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, profile, register
from attn_dispatch.decisions import call, decide
from attn_dispatch.decisions.call import ResolvedCall
from attn_dispatch.errors import InvalidInput, NoBackend, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Entry, Kind, Quarantine
from attn_dispatch.tuning import candidates
from tests.support import processes
from tests.support.calls import BUILT_IN, Plugin, close, counted, forget, formula, qkv, status, threads
from tests.support.fakes import raising

pytestmark = pytest.mark.usefixtures("little_time")


# --- mode off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "named"), [("incorrect", "sdpa"), ("hung", "planted")])
def test_mode_off_reads_no_quarantine(kind: Kind, named: str, set_mode: Callable[[str], None]) -> None:
    """Whatever other modes have put there, of built-in backends or others."""
    register(Plugin(lambda out, lse: (out, lse)))
    q, k, v = qkv()
    where = silicon("cpu")
    version = next(row.version for row in explain(q, k, v).candidates if row.backend == named)
    entry = Entry(backend=named, version=version, silicon=where, kind=kind, reason="", title="")
    Quarantine(cache_folder(), where).add(entry)
    assert status(explain(q, k, v), named) == "quarantined"
    forget()
    set_mode("off")
    found = explain(q, k, v)
    assert status(found, named) != "quarantined"
    assert found.choice == "sdpa"


def test_a_problem_runs_where_the_next_power_of_two_of_keys_needs_too_much(
    set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries are decided by the latter, which no backend can run."""
    set_mode("off")
    monkeypatch.setattr(registry, "BUILT_IN", ())
    q, k, v = torch.randn(1, 1, 8, 64), *torch.randn(2, 1, 40_000, 8, 64)
    monkeypatch.setattr(candidates, "available_bytes", lambda device: 600 << 20)
    assert explain(q, k, v).choice == "manual"
    assert attend(q, k, v).shape == q.shape
    monkeypatch.setattr(candidates, "available_bytes", lambda device: 1)
    forget()
    with pytest.raises(NoBackend, match="40000"):
        attend(q, k, v)


def test_locked_mode_asks_for_the_problem_that_can_be_measured(
    set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problem itself, where no backend runs the one with the next power of two of keys."""
    monkeypatch.setattr(registry, "BUILT_IN", ())
    q, k, v = torch.randn(1, 1, 8, 64), *torch.randn(2, 1, 40_000, 8, 64)
    set_mode("locked")
    with pytest.raises(NotDecided, match="65536"):
        attend(q, k, v)
    monkeypatch.setattr(candidates, "available_bytes", lambda device: 600 << 20)
    with pytest.raises(NotDecided, match="40000"):
        attend(q, k, v)
    set_mode("tune")
    (found,) = profile([Problem.of(q, k, v)], progress=False)
    assert "40000" in found.problem


# --- measured once ----------------------------------------------------------------------------------------------------


def test_the_first_call_measures_and_the_second_does_not() -> None:
    q, k, v = qkv()
    first = attend(q, k, v)
    assert counted(measured=1)
    assert torch.equal(attend(q, k, v), first)
    assert torch.equal(attend(q.clone(), k, v), first)
    assert counted(measured=1)
    assert len(list(Store(cache_folder()).all())) == 1


SECOND = """
import json, torch, attn_dispatch
from attn_dispatch.machine import load
load.is_calm = lambda: False  # a choice that few rounds left open would be measured again
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(16)
q, k, v = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
before = attn_dispatch.explain(q, k, v)
out = attn_dispatch.attend(q, k, v)
print(json.dumps([before.source, before.choice, before.key, attn_dispatch.counters(), out.tolist()]))
"""


def test_a_second_process_does_not_measure() -> None:
    q, k, v = qkv()
    out = attend(q, k, v)
    done = processes.run(SECOND)
    source, choice, key, counts, values = json.loads(done.stdout)
    found = explain(q, k, v)
    assert (source, choice, key) == ("measured", found.choice, found.key)
    assert {name: count for name, count in counts.items() if count} == {"loaded": 1}
    assert torch.equal(torch.tensor(values), out)
    assert done.stderr == ""


def test_concurrent_threads_measure_a_problem_once() -> None:
    q, k, v = qkv(24)
    start = Barrier(4)

    def first_call(_: int) -> Tensor:
        start.wait(timeout=60)
        out: Tensor = attend(q, k, v, is_causal=True)
        return out

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(first_call, range(4)))
    assert counted(measured=1)
    assert all(torch.equal(out, found[0]) for out in found)
    assert close(found[0], formula(q, k, v, Dense(is_causal=True))[0])


def test_calls_run_with_an_unwritable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "file" / "below"))
    q, k, v = qkv()
    for _ in range(2):
        attend(q, k, v)
    assert counted(measured=1)
    texts = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    starts = ("a crash would not be recorded: ", "decisions are not stored: ", "passed checks are not remembered: ")
    found = [sum(text.startswith(start) for text in texts) for start in starts]
    assert found[:2] == [1, 1]
    assert found[2] <= 1, "the chosen backend may have passed them in another test"
    assert len(texts) == sum(found)


# --- modes and budgets ------------------------------------------------------------------------------------------------


def test_predict_never_measures(set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    q, k, v = qkv()
    assert close(attend(q, k, v, Window(3, 2)), formula(q, k, v, Window(3, 2))[0])
    found = explain(q, k, v, Window(3, 2))
    assert (found.source, found.choice) == ("heuristic", "native")
    statuses = {row.backend: row.status for row in found.candidates}
    assert statuses["sdpa"] == "unsupported"
    assert [name for name, status in statuses.items() if status == "chosen"] == ["native"]
    problem = Problem.of(q, k, v, Window(3, 2))
    able = [name for name in ("sdpa_mask", "flex", "manual") if not registry.load(name).refusals(problem)]
    assert "manual" in able
    assert {statuses[name] for name in able} == {"not_measured"}
    assert counted(heuristic=1)
    assert not cache_folder().exists()


@pytest.mark.parametrize("mode", ["predict", "locked"])
def test_a_stored_decision_is_used(mode: str, set_mode: Callable[[str], None]) -> None:
    q, k, v = qkv()
    out = attend(q, k, v)
    forget()
    set_mode(mode)
    assert torch.equal(attend(q, k, v), out)
    assert counted(loaded=1)
    assert explain(q, k, v).source == "measured"


def test_locked_raises_on_a_miss(set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    q, k, v = qkv(dtype=torch.bfloat16)
    with pytest.raises(NotDecided) as raised:
        attend(q, k, v, is_causal=True)
    assert f"ATTN_DISPATCH_MODE=locked and no decision is stored on {silicon('cpu')} for " in str(raised.value)
    assert "[1, 16, 2, 8]   bfloat16   Dense(causal)   forward" in str(raised.value)
    assert counted()
    assert not cache_folder().exists()
    found = explain(q, k, v, is_causal=True)
    assert (found.choice, found.order) == (None, None)
    assert "locked mode, and no decision is stored" in str(found)
    assert attend(q, k, v, is_causal=True, backend="manual").shape == q.shape


def test_off_does_not_use_the_store(set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    attend(q, k, v)
    forget()
    set_mode("off")

    for name in ("get", "put"):
        monkeypatch.setattr(Store, name, raising(AssertionError("the store was used")))
    attend(q, k, v)
    assert explain(q, k, v).source == "heuristic"
    assert counted(heuristic=1)


def test_profile_needs_a_mode_other_than_off(set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    with pytest.raises(InvalidInput, match="touches no disk"):
        profile([], progress=False)


@pytest.mark.parametrize("mode", ["fast", "TUNE", " tune"])
def test_an_invalid_mode(mode: str, set_mode: Callable[[str], None]) -> None:
    set_mode(mode)
    with pytest.raises(InvalidInput) as raised:
        attend(*qkv())
    assert str(raised.value) == f"$ATTN_DISPATCH_MODE must be one of tune, online, predict, locked, off, got {mode!r}"


# --- stale decisions --------------------------------------------------------------------------------------------------


def test_a_removed_or_upgraded_plugin_makes_decisions_stale(set_mode: Callable[[str], None]) -> None:
    plugin = Plugin()
    register(plugin)
    q, k, v = qkv(512)  # long enough that no load hides the winner
    attend(q, k, v)
    set_mode("predict")
    forget()
    assert explain(q, k, v).source == "measured"
    plugin.release_name = "2"
    found = explain(q, k, v)
    assert (found.source, found.choice in BUILT_IN) == ("measured", True)
    assert "measured with version 1, which has changed" in next(
        row.reason for row in found.candidates if row.backend == "planted"
    )
    attend(q, k, v)
    assert counted(loaded=1)
    plugin.release_name = "1"
    forget()
    assert explain(q, k, v).choice == "planted"
    registry._added.clear()
    assert explain(q, k, v).choice == found.choice


def test_a_decision_that_cannot_run_now_stays_on_disk(set_mode: Callable[[str], None], tmp_path: Path) -> None:
    plugin = Plugin()
    register(plugin)
    q, k, v = qkv()
    attend(q, k, v)
    forget()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert len(before) == 1
    plugin.reasons = [Refusal("over_memory", "too much for now")]
    for setting in ("locked", "tune"):
        set_mode(setting)
        forget()
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
        assert counted(loaded=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_another_number_of_threads_is_another_machine() -> None:
    q, k, v = qkv()
    with threads(1):
        attend(q, k, v)
    with threads(2):
        assert explain(q, k, v).source == "heuristic"
        attend(q, k, v)
        assert counted(measured=2)


# --- calls by ranks ---------------------------------------------------------------------------------------------------


def on_device(problem: Problem) -> ResolvedCall:
    q, k, v = qkv()
    out, _ = call.resolve(problem).result(q, k, v)
    assert close(out, formula(q, k, v, problem.pattern)[0])
    return call._calls[problem, None, None, torch.get_num_threads()]


def test_a_decided_call_does_not_wait_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waited would make every rank wait that exchanges rows with it."""
    problem = Problem.of(*qkv())
    first = on_device(problem)
    monkeypatch.setattr(decide, "lock", None)  # entering it raises
    assert on_device(problem) is first


def test_a_replaced_decision_reaches_calls_by_ranks() -> None:
    problem = Problem.of(*qkv())
    chosen = on_device(problem).backend
    other = next(name for name in ("manual", "tiles") if not chosen.startswith(name))
    decide.adopt(problem, decide.forced_decision(problem, other, None))
    assert on_device(problem).backend.startswith(other)
