"""attend() and explain(): how a call finds its backend, what is remembered, and what is said when it cannot."""

from __future__ import annotations

import copy
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_dispatch
from attn_dispatch import attend, counters, decisions, dispatch, explain, profile, record, register, registry
from attn_dispatch.backends import manual
from attn_dispatch.contract import Refusal
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.explanation import Explanation
from attn_dispatch.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.problem import Problem
from attn_dispatch.recording import read_record
from attn_dispatch.store import Store, cache_folder

BUILT_IN = ["sdpa", "triton", "sdpa_mask", "manual"]


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: several wait for one another where other processes have the cores, which no median evens out."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "300")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda mode: monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)


def qkv(length: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, length, 2, 8, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


def formula(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """out and lse in float64, for patterns in which every query sees a key."""
    counts = pattern.multiplicity(q.shape[1], k.shape[1], q.shape[2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(q.shape[3]) + counts.double().log()
    lse = scores.logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v.double()), lse


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)


def forget() -> None:
    """As a new process would start."""
    for table in (dispatch._routes, decisions._decided, decisions._counts):
        table.clear()


def counted(**expected: int) -> bool:
    return {name: count for name, count in counters().items() if count} == expected


def status(explanation: Explanation, backend: str) -> str:
    return next(candidate.status for candidate in explanation.candidates if candidate.backend == backend)


# --- plug-ins ---------------------------------------------------------------------------------------------------------


@dataclass
class Plugin:
    """Computes once for each q and gives that again: nothing is faster, so that only the gate can keep it out."""

    change: Callable[[Tensor, Tensor], Any] = lambda out, lse: (out, lse)
    name: str = "planted"
    release_name: str = "1"
    reasons: list[Refusal] = field(default_factory=list[Refusal])
    known: dict[int, tuple[Tensor, Any]] = field(default_factory=dict[int, tuple[Tensor, Any]])

    def version(self) -> str:
        return self.release_name

    def refusals(self, problem: Problem) -> list[Refusal]:
        return self.reasons

    def workspace_bytes(self, problem: Problem) -> int:
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        if problem.needs_grad:
            return self.change(*manual.run(q, k, v, problem, **tensors))
        if id(q) not in self.known:
            self.known[id(q)] = q, self.change(*manual.run(q, k, v, problem, **tensors))
        return self.known[id(q)][1]


def one_entry(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = out.clone()
    out[0, 7, 1, 3] += 0.01
    return out, lse


def one_nan(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = out.clone()
    out[0, 7, 1, 3] = math.nan
    return out, lse


def raising(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("out of\norder")


def wrong_grad(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The right values; the gradient of another function."""
    return out.detach() + 1.01 * (out - out.detach()), lse


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "scaled": (lambda out, lse: (out * 1.01, lse), "incorrect", "out is off by"),
    "one-entry": (one_entry, "incorrect", "out is off by"),
    "nan": (one_nan, "incorrect", "out has NaN"),
    "all-nan": (lambda out, lse: (out * math.nan, lse), "incorrect", "out has NaN"),
    "lse": (lambda out, lse: (out, lse + 0.01), "incorrect", "lse is off by"),
    "lse-base-2": (lambda out, lse: (out, lse / math.log(2)), "incorrect", "lse is off by"),
    "lse-dtype": (lambda out, lse: (out, lse.double()), "incorrect", "lse is torch.float64, not torch.float32"),
    "lse-shape": (lambda out, lse: (out, lse.mT), "incorrect", "lse has shape [1, 16, 2], not [1, 2, 16]"),
    "no-lse": (lambda out, lse: out, "incorrect", "lse was asked for and not returned"),
    "dtype": (lambda out, lse: (out.double(), lse), "incorrect", "out is torch.float64, not torch.float32"),
    "shape": (lambda out, lse: (out.transpose(1, 2), lse), "incorrect", "out has shape [1, 2, 16, 8]"),
    "raises": (raising, "failed", "RuntimeError: out of order"),
    "none": (lambda out, lse: None, "failed", "TypeError"),
}
WRONG_GRADS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "detached": (lambda out, lse: (out.detach(), lse), "failed", "RuntimeError"),
    "gradient": (wrong_grad, "incorrect", "dq is off by"),
}


@pytest.mark.parametrize(("change", "expected", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_not_chosen(change: Callable[[Tensor, Tensor], Any], expected: str, reason: str) -> None:
    register(Plugin(change))
    q, k, v = qkv()
    out, lse = attend(q, k, v, is_causal=True, return_lse=True)
    exact = formula(q, k, v, Dense(is_causal=True))
    assert close(out, exact[0])
    assert close(lse, exact[1])
    found = explain(q, k, v, is_causal=True, return_lse=True)
    row = next(candidate for candidate in found.candidates if candidate.backend == "planted")
    assert found.choice in BUILT_IN
    assert row.status == expected
    assert reason in row.reason
    assert row.median_ms is None


@pytest.mark.parametrize(("change", "expected", "reason"), WRONG_GRADS.values(), ids=WRONG_GRADS)
def test_wrong_gradients_are_not_chosen(change: Callable[[Tensor, Tensor], Any], expected: str, reason: str) -> None:
    register(Plugin(change))
    q, k, v = qkv()
    q.requires_grad_()
    attend(q, k, v)
    row = next(candidate for candidate in explain(q, k, v).candidates if candidate.backend == "planted")
    assert row.status == expected
    assert reason in row.reason


def test_what_is_right_and_fastest_is_chosen() -> None:
    register(Plugin())
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    found = explain(q, k, v)
    assert (found.choice, found.source) == ("planted", "measured")
    assert status(found, "manual") == "slower"


def test_out_alone_is_enough_where_lse_is_not_asked_for() -> None:
    plugin = Plugin(lambda out, lse: out)
    register(plugin)
    q, k, v = qkv()
    attend(q, k, v)
    assert explain(q, k, v).choice == "planted"
    assert torch.equal(attend(q, k, v, backend="planted"), plugin.known[id(q)][1])
    mask = torch.ones(1, 16, dtype=torch.bool)
    for key_mask in (None, mask):
        with pytest.raises(BackendFailed, match="planted was asked for lse and did not return it"):
            attend(q, k, v, backend="planted", return_lse=True, key_mask=key_mask)


def test_a_plugin_that_is_gone_or_renewed_makes_decisions_stale(set_mode: Callable[[str], None]) -> None:
    plugin = Plugin()
    register(plugin)
    q, k, v = qkv()
    attend(q, k, v)
    set_mode("predict")
    forget()
    assert explain(q, k, v).source == "measured"
    plugin.release_name = "2"
    assert explain(q, k, v).source == "heuristic"
    attend(q, k, v)
    assert counted(heuristic=1)
    plugin.release_name = "1"
    forget()
    assert explain(q, k, v).source == "measured"
    registry._added.clear()
    assert explain(q, k, v).source == "heuristic"


def test_a_choice_that_refuses_by_now_is_not_taken(set_mode: Callable[[str], None]) -> None:
    plugin = Plugin()
    register(plugin)
    q, k, v = qkv()
    attend(q, k, v)
    forget()
    plugin.reasons = [Refusal("moon", "not at full moon")]
    set_mode("predict")
    found = explain(q, k, v)
    assert (found.source, found.choice, status(found, "planted")) == ("heuristic", "sdpa", "unsupported")


def test_a_decision_that_cannot_run_now_is_kept(set_mode: Callable[[str], None], tmp_path: Path) -> None:
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
        assert counted(heuristic=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_another_number_of_threads_is_another_machine() -> None:
    q, k, v = qkv()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        attend(q, k, v)
        torch.set_num_threads(2)
        assert explain(q, k, v).source == "heuristic"
        attend(q, k, v)
        assert counted(measured=2)
    finally:
        torch.set_num_threads(threads)


def test_settings_of_the_newer_matmul_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was used, torch refuses to answer by the older one."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; from attn_dispatch import attend, explain;"
        "x = torch.randn(1, 8, 2, 4); attend(x, x, x); attend(x, x, x); print(explain(x, x, x).problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "matmul high" in done.stdout


@pytest.mark.parametrize("code", ["not_installed", "over_memory", "moon"])
def test_a_refusal_is_a_status_and_a_reason(code: str) -> None:
    register(Plugin(reasons=[Refusal(code, "is not here"), Refusal("other", "nor there")]))
    found = explain(*qkv())
    row = next(candidate for candidate in found.candidates if candidate.backend == "planted")
    assert row.status == ("unsupported" if code == "moon" else code)
    assert row.reason == "is not here; nor there"


@pytest.mark.parametrize("part", ["version", "refusals", "workspace_bytes"])
def test_a_broken_plugin_does_not_take_the_call_along(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    plugin = Plugin()
    monkeypatch.setattr(plugin, part, broken)
    register(plugin)
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    if part != "version":
        assert status(explain(q, k, v), "planted") == "failed"


def test_refusals_that_are_no_refusals() -> None:
    register(Plugin(reasons=["no"]))  # type: ignore[list-item]
    q, k, v = qkv()
    attend(q, k, v)
    assert status(explain(q, k, v), "planted") == "failed"


@pytest.mark.parametrize("call", [attend, explain])
def test_a_forced_backend_that_cannot_tell(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem) -> None:
        raise KeyError("broken")

    plugin = Plugin()
    monkeypatch.setattr(plugin, "refusals", broken)
    register(plugin)
    with pytest.raises(BackendFailed, match="planted cannot tell whether it can run") as raised:
        call(*qkv(), backend="planted")
    assert isinstance(raised.value.__cause__, KeyError)


RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "none": (lambda out, lse: None, "NoneType"),
    "list": (lambda out, lse: [out, lse], "list"),
    "dict": (lambda out, lse: {"out": out, "lse": lse}, "dict"),
}


@pytest.mark.parametrize(
    "options", [{}, {"layout": "bhnd"}, {"return_lse": True}, {"layout": "bhnd", "return_lse": True}], ids=str
)
@pytest.mark.parametrize(("change", "kind"), RETURNED.values(), ids=RETURNED)
def test_what_is_no_result(change: Callable[[Tensor, Tensor], Any], kind: str, options: dict[str, Any]) -> None:
    register(Plugin(change))
    q, k, v = qkv()
    with pytest.raises(BackendFailed, match=f"planted returned a {kind}, neither out nor"):
        attend(q, k, v, backend="planted", **options)


def test_a_module_will_do() -> None:
    module: Any = SimpleNamespace(**{name: getattr(manual, name) for name in registry.REQUIRED} | {"name": "module"})
    register(module)
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, backend="module"), attend(q, k, v, backend="manual"))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (SimpleNamespace(name="a", version=str, run=str), "lacks refusals, workspace_bytes; it needs name, version"),
        (3, "lacks name, version, refusals, workspace_bytes, run"),
        (Plugin(name="two words"), "backend.name must be an identifier, got 'two words'"),
        (Plugin(name=""), "backend.name must be an identifier, got ''"),
        (Plugin(name=7), "backend.name must be an identifier, got 7"),  # type: ignore[arg-type]
        (Plugin(name="sdpa"), "a backend named 'sdpa' is there already: sdpa, triton, sdpa_mask, "),
        (Plugin(name="manual"), "a backend named 'manual' is there already"),
    ],
    ids=["some-missing", "all-missing", "spaces", "empty", "number", "built-in", "last"],
)
def test_what_cannot_be_registered(backend: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        register(backend)
    assert message in str(raised.value)
    assert not registry._added


def test_a_name_is_registered_once() -> None:
    register(Plugin())
    with pytest.raises(InvalidInput, match="a backend named 'planted' is there already"):
        register(Plugin())


# --- the store and the modes ------------------------------------------------------------------------------------------


def test_the_first_call_measures_and_the_second_looks_up() -> None:
    q, k, v = qkv()
    first = attend(q, k, v)
    assert counted(measured=1)
    assert torch.equal(attend(q, k, v), first)
    assert torch.equal(attend(q.clone(), k, v), first)
    assert counted(measured=1)
    assert len(list(Store(cache_folder()).all())) == 1


SECOND = """
import json, torch, attn_dispatch
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
    done = subprocess.run([sys.executable, "-c", SECOND], check=True, capture_output=True, text=True, timeout=120)
    source, choice, key, counts, values = json.loads(done.stdout)
    found = explain(q, k, v)
    assert (source, choice, key) == ("measured", found.choice, found.key)
    assert counts == {"measured": 0, "loaded": 1, "shipped": 0, "heuristic": 0, "forced": 0}
    assert torch.equal(torch.tensor(values), out)
    assert done.stderr == ""


def test_explain_runs_nothing() -> None:
    found = explain(*qkv())
    assert found.source == "heuristic"
    assert counted()
    assert not cache_folder().exists()


def test_predict_never_measures(set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    q, k, v = qkv()
    assert close(attend(q, k, v, Window(3, 2)), formula(q, k, v, Window(3, 2))[0])
    found = explain(q, k, v, Window(3, 2))
    assert (found.source, found.choice) == ("heuristic", "sdpa_mask")
    assert [(row.backend, row.status) for row in found.candidates] == [
        ("sdpa", "unsupported"),
        ("triton", "unsupported" if find_spec("triton") else "not_installed"),
        ("sdpa_mask", "chosen"),
        ("manual", "not_measured"),
    ]
    assert counted(heuristic=1)
    assert not cache_folder().exists()


@pytest.mark.parametrize("mode", ["predict", "locked"])
def test_what_was_measured_is_used(mode: str, set_mode: Callable[[str], None]) -> None:
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
    assert "ATTN_DISPATCH_MODE=locked" in str(raised.value)
    assert "[1, 16, 2, 8]   bfloat16   Dense(causal)   forward" in str(raised.value)
    assert counted()
    assert not cache_folder().exists()
    assert attend(q, k, v, is_causal=True, backend="manual").shape == q.shape


def test_off_touches_no_disk(set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    attend(q, k, v)
    forget()
    set_mode("off")

    def touched(*args: object) -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(Store, "get", touched)
    monkeypatch.setattr(Store, "put", touched)
    attend(q, k, v)
    assert explain(q, k, v).source == "heuristic"
    assert counted(heuristic=1)


def test_off_makes_no_folder(set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    attend(*qkv())
    explain(*qkv())
    assert not cache_folder().exists()


def test_profile_has_nowhere_to_write_when_off(set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    with pytest.raises(InvalidInput, match="touches no disk"):
        profile([], progress=False)


@pytest.mark.parametrize("mode", ["fast", "TUNE", " tune"])
def test_a_wrong_mode(mode: str, set_mode: Callable[[str], None]) -> None:
    set_mode(mode)
    with pytest.raises(InvalidInput) as raised:
        attend(*qkv())
    assert str(raised.value) == f"$ATTN_DISPATCH_MODE must be one of tune, predict, locked, off, got {mode!r}"


@pytest.mark.parametrize("budget", ["-1", "soon", "nan", "1s"])
def test_a_wrong_budget(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", budget)
    with pytest.raises(InvalidInput) as raised:
        attend(*qkv())
    assert str(raised.value) == f"$ATTN_DISPATCH_BUDGET_MS must be a number >= 0, got {budget!r}"


@pytest.mark.parametrize("budget", ["0", "", "1e2"])
def test_budgets_that_will_do(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", budget)
    attend(*qkv())
    assert counted(measured=1)


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "file" / "below"))
    q, k, v = qkv()
    for _ in range(2):
        attend(q, k, v)
    assert counted(measured=1)
    warnings = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 2  # reading, and writing


# --- one forced backend -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [name for name in BUILT_IN if name != "triton"])
def test_a_forced_backend_runs(backend: str, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    q, k, v = qkv()
    out, lse = attend(q, k, v, is_causal=True, backend=backend, order="natural", return_lse=True)
    exact = formula(q, k, v, Dense(is_causal=True))
    assert close(out, exact[0])
    assert close(lse, exact[1])
    found = explain(q, k, v, is_causal=True, backend=backend, order="natural")
    assert (found.choice, found.order, found.source) == (backend, "natural", "forced")
    assert [row.status for row in found.candidates] == ["chosen"]
    assert counted(forced=1)
    assert not cache_folder().exists()


def test_the_natural_order_is_accepted_alone() -> None:
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, order="natural"), attend(q, k, v))


@pytest.mark.parametrize("call", [attend, explain])
def test_a_forced_backend_that_refuses(call: Callable[..., Any]) -> None:
    with pytest.raises(NoBackend) as raised:
        call(*qkv(), Window(3, 0), dropout_p=0.5, backend="sdpa")
    text = str(raised.value)
    for part in ("Window(left=3, right=0)", "q [1, 16, 2, 8]", "asked for 0.5", "is not made of dense", "backend=None"):
        assert part in text


@pytest.mark.parametrize("call", [attend, explain])
@pytest.mark.parametrize("backend", ["abacus", "", 3, ["sdpa"], "../manual"], ids=repr)
def test_an_unknown_backend(call: Callable[..., Any], backend: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        call(*qkv(), backend=backend)
    assert str(raised.value) == f"backend must be None or one of sdpa, triton, sdpa_mask, manual, got {backend!r}"


@pytest.mark.parametrize("call", [attend, explain])
@pytest.mark.parametrize("order", ["random", "", 3, ["natural"]], ids=repr)
def test_an_unknown_order(call: Callable[..., Any], order: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        call(*qkv(), order=order)
    assert f"order must be None or one of 'natural', got {order!r}" == str(raised.value)


@pytest.mark.parametrize("masked", [False, True])
def test_a_backend_that_raises(masked: bool) -> None:
    register(Plugin(raising))
    mask = torch.ones(1, 16, dtype=torch.bool) if masked else None
    with pytest.raises(BackendFailed) as raised:
        attend(*qkv(), backend="planted", key_mask=mask)
    assert "planted failed on [1, 16, 2, 8]" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert str(raised.value.__cause__) == "out of\norder"


def test_no_backend_at_all() -> None:
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(NoBackend) as raised:
        attend(*qkv(), mesh=mesh)
    lines = str(raised.value).splitlines()
    assert [line.strip().split(":")[0] for line in lines[2:]] == BUILT_IN
    assert all("sharded over 2" in line for line in lines[2:])
    assert issubclass(NoBackend, AttnDispatchError)
    found = explain(*qkv(), mesh=mesh)
    assert found.choice is None
    assert found.order is None


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_lse_in_each_dtype() -> None:
    for dtype, wide in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v = qkv(dtype=dtype)
        out, lse = attend(q, k, v, return_lse=True)
        assert (out.dtype, lse.dtype, lse.shape) == (dtype, wide, (1, 2, 16))
        assert isinstance(attend(q, k, v), Tensor)


@pytest.mark.parametrize("seq_lens", [None, torch.tensor([9])], ids=["plain", "masked"])
def test_the_other_layout(seq_lens: Tensor | None) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"is_causal": True, "return_lse": True, "seq_lens": seq_lens}
    out, lse = attend(q, k, v, **options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out_swapped, lse_swapped = attend(q, k, v, layout="bhnd", **options)
    assert torch.equal(out_swapped, out.transpose(1, 2))
    assert torch.equal(lse_swapped, lse)
    assert counted(measured=1)


def test_masks_are_of_the_call_and_not_of_the_route() -> None:
    q, k, v = qkv()
    for length in (16, 3, 9):
        out = attend(q, k, v, seq_lens=torch.tensor([length]))
        assert close(out[:, :length], formula(q[:, :length], k[:, :length], v[:, :length], Dense())[0])
        assert not out[:, length:].any()
    with pytest.raises(InvalidInput, match="seq_lens must lie in"):
        attend(q, k, v, seq_lens=torch.tensor([17]))
    assert counted(measured=1)


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = qkv()
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(q, k, v), attend(q, k, v, return_lse=True)[1]
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected)
    assert attend(q, k, v).dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = qkv(dtype=torch.float64)
    expected = attend(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q, k, v), expected)
    assert counted(measured=1)


def test_gradients_pass_through_autocast() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        attend(q, k, v).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert q.grad.any()


def test_autocast_does_not_reach_the_trial() -> None:
    """It would compute what should be in float32 in bfloat16, and correct backends would be thought wrong."""
    with torch.autocast("cpu", torch.bfloat16):
        attend(*qkv())
        found = explain(*qkv())
    assert {row.backend: row.status for row in found.candidates if row.status in ("incorrect", "failed")} == {}


BRANCHES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tuples": lambda: ((4, 8), (1, 2)),
    "lists": lambda: ([4, 8], [1, 2]),
    "other-order": lambda: ([8, 4], [2, 1]),
    "numpy": lambda: (np.array([4, 8]), np.array([1, 2])),
    "torch": lambda: (torch.tensor([4, 8]), torch.tensor([1, 2])),
    "range": lambda: (range(4, 9, 4), range(1, 3)),
    "iterators": lambda: (iter([4, 8]), iter([1, 2])),
}


@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES)
def test_any_sequence_of_branches(branches: Callable[[], tuple[Iterable[int], Iterable[int]]]) -> None:
    q, k, v = qkv()
    expected = attend(q, k, v, Dilated((4, 8), (1, 2)))
    routes = []
    for _ in range(2):
        lengths, rates = branches()
        assert torch.equal(attend(q, k, v, segment_lengths=lengths, dilation_rates=rates), expected)
        routes.append(len(dispatch._routes))
    assert counted(measured=1)
    assert routes[0] == routes[1], "a call that was met leaves nothing behind"


def test_one_branch_may_be_a_number() -> None:
    q, k, v = qkv()
    found = attend(q, k, v, segment_lengths=8, dilation_rates=np.array(2), backend="manual")  # type: ignore[arg-type]
    assert torch.equal(found, attend(q, k, v, Dilated((8,), (2,)), backend="manual"))


def test_meta_tensors_are_explained_and_not_run() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    found = explain(q, k, v, segment_lengths=[4, 8], dilation_rates=[1, 2])
    assert found.choice is not None
    assert "Dilated((4, 8), (1, 2))" in found.problem
    with pytest.raises(InvalidInput, match=r"meta device and hold no data; explain\(\) takes them"):
        attend(q, k, v)


@pytest.mark.parametrize(
    "bad", [torch.zeros(1, 16, 2, 8).to_sparse(), None, np.zeros((1, 16, 2, 8))], ids=["sparse", "none", "numpy"]
)
def test_wrong_tensors_are_wrong_input(bad: Any) -> None:
    q, k, v = qkv()
    for tensors in ((bad, k, v), (q, bad, v), (q, k, bad)):
        with pytest.raises(InvalidInput):
            attend(*tensors)


def test_wrong_input_stands_alone() -> None:
    """What went wrong inside, looking for a route, is not the user's."""
    with pytest.raises(InvalidInput) as raised:
        attend(*qkv(), seq_lens=[1, 2])  # type: ignore[arg-type]
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


# --- settings of the caller -------------------------------------------------------------------------------------------


def test_settings_that_make_another_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    attend(q, k, v)
    torch.set_float32_matmul_precision("medium")
    try:
        attend(q, k, v)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert counted(measured=2)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counted(measured=3)
    attend(q, k, v)
    assert counted(measured=3)


def test_the_default_device_does_not_reach_the_trial() -> None:
    q, k, v = qkv()
    torch.set_default_device("meta")
    try:
        out = attend(q, k, v)
    finally:
        torch.set_default_device(None)
    assert close(out, formula(q, k, v, Dense())[0])
    assert counted(measured=1)


def test_a_trial_leaves_random_numbers_alone() -> None:
    """A run that measures and one that does not must draw the same."""
    q, k, v = qkv()
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        dispatch._routes.clear()
        drawn.append((attend(q, k, v, dropout_p=0.5), torch.rand(3)))
    assert counted(measured=1)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def gradients(run: Callable[..., Tensor], pattern: Pattern) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = run(q, k, v, pattern)
    torch.autograd.backward(out.square().sum())
    found = [x.grad for x in (q, k, v)]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def exact_gradients(pattern: Pattern) -> list[Tensor]:
    return gradients(lambda q, k, v, pattern: formula(q, k, v, pattern)[0], pattern)


def non_leaf(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    found: Tensor = attend(q * 1, k * 1, v * 1, pattern)
    return found


def checkpointed(use_reentrant: bool) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        found: Tensor = checkpoint(attend, *arguments, use_reentrant=use_reentrant)
        return found

    return run


RUNS: dict[str, Callable[..., Tensor]] = {
    "leaf": attend,
    "non-leaf": non_leaf,
    "checkpoint": checkpointed(use_reentrant=False),
    "checkpoint-reentrant": checkpointed(use_reentrant=True),
}


@pytest.mark.parametrize("pattern", [Dense(), Window(4, 2), Dilated((4, 16), (1, 2))], ids=str)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients(run: Callable[..., Tensor], pattern: Pattern) -> None:
    """The first call measures, wherever it is made."""
    for found, exact in zip(gradients(run, pattern), exact_gradients(pattern), strict=True):
        assert close(found, exact.double())
    assert counters()["measured"] == (2 if run is RUNS["checkpoint-reentrant"] else 1)


def test_inference_mode_then_training() -> None:
    with torch.inference_mode():
        q, k, v = qkv()
        assert close(attend(q, k, v, Window(4, 2)), formula(q, k, v, Window(4, 2))[0])
    for found, exact in zip(gradients(attend, Window(4, 2)), exact_gradients(Window(4, 2)), strict=True):
        assert close(found, exact.double())


def test_no_grad_is_another_problem() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    assert attend(q, k, v).requires_grad
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad
    assert counted(measured=2)


def test_threads_that_meet_a_problem_together_measure_it_once() -> None:
    q, k, v = qkv(24)
    start = Barrier(4)

    def first_call(_: int) -> Tensor:
        start.wait(timeout=60)
        out: Tensor = attend(q, k, v, is_causal=True)
        return out

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(first_call, range(4)))
    assert counted(measured=1)
    assert all(torch.equal(out, found[0]) for out in found)
    assert close(found[0], formula(q, k, v, Dense(is_causal=True))[0])


# --- torch.compile ----------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).unflatten(-1, (2, 3, 8)).unbind(-2)
        found: Tensor = self.outward(attend(q, k, v, Window(4, 0)).flatten(-2))
        return found


def test_a_compiled_function() -> None:
    q, k, v = qkv()

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(q + q, k, v, segment_lengths=(4, 8), dilation_rates=(1, 2), return_lse=True)
        found: Tensor = out * 2 + lse.sum()
        return found

    compiled: Callable[..., Tensor] = torch.compile(doubled, backend="eager")
    assert torch.equal(compiled(q, k, v), doubled(q, k, v))
    assert counted(measured=1)


# The compiler hides this one by a filter of its own, which is not asked where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_module_with_gradients() -> None:
    torch.manual_seed(0)
    layer = Layer()
    twin = copy.deepcopy(layer)
    found = backward(torch.compile(twin, backend="eager"), twin)
    assert len(found) == 5
    assert all(torch.equal(one, other) for one, other in zip(found, backward(layer, layer), strict=True))


def backward(run: Callable[[Tensor], Tensor], layer: Layer) -> list[Any]:
    x = qkv()[0].flatten(-2).requires_grad_()
    torch.autograd.backward(run(x).square().sum())
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


# --- recording and profiling ------------------------------------------------------------------------------------------


def test_each_distinct_problem_is_recorded_once(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    path = tmp_path / "met.jsonl"
    q, k, v = qkv()
    set_mode("predict")
    attend(q, k, v)
    with record(path):
        for _ in range(2):
            attend(q, k, v)
            attend(q, k, v, is_causal=True)
        attend(q.clone(), k, v, order="natural")
        attend(q, k, v, Window(99, 0))
        attend(q, k, v, return_lse=True, backend="manual")
    attend(q, k, v, Window(3, 3))
    expected = [
        Problem.of(q, k, v),
        Problem.of(q, k, v, is_causal=True),
        Problem.of(q, k, v, return_lse=True),
    ]
    assert read_record(path) == expected
    assert len(path.read_text().splitlines()) == 3


def test_a_record_is_continued(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    path = tmp_path / "met.jsonl"
    for pattern in (Dense(), Window(2, 2)):
        with record(path):
            attend(*qkv(), pattern)
    assert [problem.pattern for problem in read_record(path)] == [Dense(), Window(2, 2)]


def test_a_problem_is_recorded_before_it_fails(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    with record(tmp_path / "met.jsonl"), pytest.raises(NotDecided):
        attend(*qkv())
    assert read_record(tmp_path / "met.jsonl") == [Problem.of(*qkv())]


def test_a_record_within_a_record(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    q, k, v = qkv()
    with record(tmp_path / "outer"):
        attend(q, k, v)
        with record(tmp_path / "inner"):
            attend(q, k, v)
    assert read_record(tmp_path / "outer") == read_record(tmp_path / "inner") == [Problem.of(q, k, v)]


def test_profile_settles_what_was_recorded(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    q, k, v = qkv()
    set_mode("predict")
    with record(tmp_path / "met.jsonl"):
        attend(q, k, v)
        attend(q, k, v, Window(3, 0))
    assert explain(q, k, v).source == "heuristic"
    seen = []
    found = profile(tmp_path / "met.jsonl", budget_s=0.6, progress=False, report=lambda i, each: seen.append((i, each)))
    assert [each.source for each in found] == ["measured", "measured"]
    assert seen == list(enumerate(found))
    assert found[0] == explain(q, k, v)
    assert found[1] == explain(q, k, v, Window(3, 0))
    forget()
    set_mode("locked")
    attend(q, k, v)
    attend(q, k, v, Window(3, 0))
    assert counted(loaded=2)


def test_profile_measures_again_only_when_told_to() -> None:
    problems = [Problem.of(*qkv())]
    for force, measured in ((False, 1), (False, 1), (True, 2)):
        profile(problems, budget_s=0.3, progress=False, force=force)
        assert counters()["measured"] == measured


def test_training_is_profiled_from_inference_mode() -> None:
    problem = replace(Problem.of(*qkv()), needs_grad=True)
    with torch.inference_mode():
        (found,) = profile([problem], budget_s=0.3, progress=False)
    assert found.source == "measured"
    assert all(row.status != "failed" for row in found.candidates)


def test_profile_of_nothing() -> None:
    assert profile([], progress=False) == []


@pytest.mark.parametrize("budget", [0, -1, math.nan])
def test_profile_needs_time(budget: float) -> None:
    with pytest.raises(InvalidInput, match="budget_s must be a number > 0 or None"):
        profile([], budget_s=budget, progress=False)


# --- what explain says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [False, True])
def test_an_explanation_is_a_table(measured: bool) -> None:
    q, k, v = qkv()
    register(Plugin(reasons=[Refusal("moon", "not at full moon")]))
    if measured:
        attend(q, k, v)
    found = explain(q, k, v)
    assert [row.backend for row in found.candidates] == ["sdpa", "triton", "sdpa_mask", "planted", "manual"]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[-5:]] == [row.backend for row in found.candidates]
    assert "unsupported: not at full moon" in lines[-2]
    assert found.key in str(found)
    assert json.loads(json.dumps(found.to_dict()))["choice"] == found.choice


def test_explain_takes_what_attend_takes() -> None:
    with pytest.raises(TypeError, match="colour"):
        explain(*qkv(), colour="red")
    with pytest.raises(InvalidInput, match="explain takes attend's arguments"):
        explain(*qkv(), device="cpu")


# --- the package ------------------------------------------------------------------------------------------------------

PUBLIC = [
    "AttnDispatchError",
    "BackendFailed",
    "Dense",
    "Dilated",
    "Explanation",
    "GroupMismatch",
    "InvalidInput",
    "Neighborhood",
    "NoBackend",
    "NotDecided",
    "Problem",
    "Window",
    "attend",
    "counters",
    "explain",
    "hardware",
    "profile",
    "record",
    "register",
]


def test_public_names() -> None:
    assert attn_dispatch.__all__ == PUBLIC
    assert all(getattr(attn_dispatch, name).__name__ == name for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(attn_dispatch))


def test_other_names() -> None:
    assert attn_dispatch.__version__.count(".") >= 1
    with pytest.raises(AttributeError, match="has no attribute 'atend'"):
        attn_dispatch.atend  # noqa: B018
