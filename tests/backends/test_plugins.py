"""Backends of other packages: only correct ones are chosen, errors name the broken ones."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, process_state, profile, register
from attn_dispatch.backends import manual
from attn_dispatch.cli import main
from attn_dispatch.errors import BackendFailed, InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import REQUIRED, Refusal
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.quarantine import Entry, Quarantine
from attn_dispatch.tuning import candidates
from tests.support import processes
from tests.support.calls import BUILT_IN, Plugin, close, formula, qkv, status
from tests.support.fakes import raising

pytestmark = pytest.mark.usefixtures("little_time")
short = pytest.mark.usefixtures("short_trials")


# --- the gate ---------------------------------------------------------------------------------------------------------


def one_entry(out: Tensor, lse: Tensor, more: float = 0.01) -> tuple[Tensor, Tensor]:
    out = out.clone()
    out[0, -1, 1, 3] += more
    return out, lse


FAILS = raising(RuntimeError("out of\norder"))
WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "scaled": (lambda out, lse: (out * 1.01, lse), "incorrect", "out is off by"),
    "one_entry": (one_entry, "incorrect", "out is off by"),
    "nan": (partial(one_entry, more=math.nan), "incorrect", "out has NaN"),
    "all_nan": (lambda out, lse: (out * math.nan, lse), "incorrect", "out has NaN"),
    "lse": (lambda out, lse: (out, lse + 0.01), "incorrect", "lse is off by"),
    "lse_base_2": (lambda out, lse: (out, lse / math.log(2)), "incorrect", "lse is off by"),
    "lse_dtype": (lambda out, lse: (out, lse.double()), "incorrect", "lse is torch.float64, not torch.float32"),
    "lse_shape": (lambda out, lse: (out, lse.mT), "incorrect", "lse has shape [1, 16, 2], not [1, 2, 16]"),
    "no_lse": (lambda out, lse: out, "incorrect", "lse was asked for and not returned"),
    "dtype": (lambda out, lse: (out.double(), lse), "incorrect", "out is torch.float64, not torch.float32"),
    "shape": (lambda out, lse: (out.transpose(1, 2), lse), "incorrect", "out has shape [1, 2, 16, 8]"),
    "raises": (FAILS, "failed", "RuntimeError: out of order"),
    "none": (lambda out, lse: None, "failed", "TypeError"),
}


def test_wrong_results_are_not_chosen() -> None:
    """Of no backend of many, each of which would be the fastest."""
    for name, (change, _, _) in WRONG.items():
        register(Plugin(change, name))
    q, k, v = qkv()
    out, lse = attend(q, k, v, is_causal=True, return_lse=True)
    exact = formula(q, k, v, Dense(is_causal=True))
    assert close(out, exact[0])
    assert close(lse, exact[1])
    found = explain(q, k, v, is_causal=True, return_lse=True)
    assert found.choice in BUILT_IN
    rows = {each.backend: each for each in found.candidates}
    for name, (_, expected, reason) in WRONG.items():
        row = rows[name]
        assert (name, row.status, row.median_ms) == (name, expected, None)
        assert reason in row.reason


def test_the_fastest_correct_backend_is_chosen() -> None:
    register(Plugin())
    q, k, v = qkv(512)  # long enough that no load hides the winner
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    found = explain(q, k, v)
    assert (found.choice, found.source) == ("planted", "measured")


def test_out_alone_is_enough_where_lse_is_not_asked_for() -> None:
    plugin = Plugin(lambda out, lse: out)
    register(plugin)
    q, k, v = qkv()
    profile([Problem.of(q, k, v)], budget_s=2.0, progress=False)
    assert status(explain(q, k, v), "planted") in ("chosen", "slower", "tie")  # by the load beside it
    attend(q, k, v)
    assert torch.equal(attend(q, k, v, backend="planted"), plugin.known[id(q)][1])
    mask = torch.ones(1, 16, dtype=torch.bool)
    for key_mask in (None, mask):
        with pytest.raises(BackendFailed, match="planted was asked for lse and did not return it"):
            attend(q, k, v, backend="planted", return_lse=True, key_mask=key_mask)


# --- plug-ins that refuse or fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["not_installed", "over_memory", "moon"])
def test_a_refusal_is_a_status_and_a_reason(code: str) -> None:
    register(Plugin(reasons=[Refusal(code, "is not here"), Refusal("other", "nor there")]))
    found = explain(*qkv())
    row = next(candidate for candidate in found.candidates if candidate.backend == "planted")
    assert row.status == ("unsupported" if code == "moon" else code)
    assert row.reason == "is not here; nor there"


class Panic(BaseException):
    """Such as exceptions of Rust code, or of cancelled tasks, which are no `Exception`."""


ERRORS = (RuntimeError("broken"), SystemExit(3), Panic("stop"), KeyboardInterrupt(), GeneratorExit())


@pytest.mark.parametrize("part", ["version", "refusals", "workspace_bytes", "orders", "run"])
def test_a_broken_plugin_neither_ends_the_call_nor_the_program(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ERRORS:
        plugin = Plugin(name=type(error).__name__)
        monkeypatch.setattr(plugin, part, raising(error), raising=False)
        register(plugin)
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    rows = {each.backend: each for each in explain(q, k, v).candidates}
    for name in [type(error).__name__ for error in ERRORS] if part != "version" else ():
        assert rows[name].status == "failed"
        assert (name if name in ("RuntimeError", "SystemExit") else f"raised {name}") in rows[name].reason


@short
@pytest.mark.parametrize("part", ["version", "refusals", "workspace_bytes", "orders"])
def test_a_plugin_that_does_not_answer(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once in a process; a later process leaves it out, where its version is known."""
    asked: list[object] = []

    def hang(*args: object) -> None:
        asked.append(args)
        while True:
            time.sleep(0.001)

    monkeypatch.setattr(candidates, "timeout_s", lambda: 0.3)  # of the questions to a plug-in alone
    plugin = Plugin()
    monkeypatch.setattr(plugin, part, hang, raising=False)
    register(plugin)
    for length in (16, 24):
        q, k, v = qkv(length)
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
        row = next(row for row in explain(q, k, v).candidates if row.backend == "planted")
        assert (row.status, "did not return within 0.3 s" in row.reason) == ("failed", True)
    assert len(asked) == 1
    found = [(entry.backend, entry.kind) for entry in Quarantine(cache_folder(), silicon("cpu")).entries()]
    assert found == [("planted", "hung")] * (part != "version")
    if part != "version":
        candidates._stalled.clear()
        assert status(explain(*qkv(32)), "planted") == "quarantined"
        assert len(asked) == 1


def test_a_forced_backend_whose_refusals_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Plugin()
    monkeypatch.setattr(plugin, "refusals", raising(KeyError("broken")))
    register(plugin)
    with pytest.raises(BackendFailed, match=r"planted cannot tell whether it can run .*KeyError: 'broken'"):
        attend(*qkv(), backend="planted")
    found = explain(*qkv(), backend="planted")
    assert found.choice is None
    assert status(found, "planted") == "failed"


@pytest.mark.parametrize("masked", [False, True])
def test_a_backend_that_raises(masked: bool) -> None:
    register(Plugin(FAILS))
    mask = torch.ones(1, 16, dtype=torch.bool) if masked else None
    with pytest.raises(BackendFailed) as raised:
        attend(*qkv(), backend="planted", key_mask=mask)
    assert "planted failed on [1, 16, 2, 8]" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert str(raised.value.__cause__) == "out of\norder"


RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "none": (lambda out, lse: None, "NoneType"),
    "list": (lambda out, lse: [out, lse], "list"),
    "dict": (lambda out, lse: {"out": out, "lse": lse}, "dict"),
    "tuple of one": (lambda out, lse: (out,), "tuple"),
}


@pytest.mark.parametrize(
    "options", [{}, {"layout": "bhnd"}, {"return_lse": True}, {"layout": "bhnd", "return_lse": True}], ids=str
)
@pytest.mark.parametrize(("change", "kind"), RETURNED.values(), ids=RETURNED)
def test_invalid_results(change: Callable[[Tensor, Tensor], Any], kind: str, options: dict[str, Any]) -> None:
    register(Plugin(change))
    q, k, v = qkv()
    with pytest.raises(BackendFailed, match=f"planted returned a {kind}, neither out nor"):
        attend(q, k, v, backend="planted", **options)


# --- registering ------------------------------------------------------------------------------------------------------


def test_a_module_is_a_backend() -> None:
    module: Any = SimpleNamespace(**{name: getattr(manual, name) for name in REQUIRED} | {"name": "module"})
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
        (Plugin(name="sdpa"), "a backend named 'sdpa' is there already: " + ", ".join(registry.BUILT_IN)),
        (Plugin(name="manual"), "a backend named 'manual' is there already"),
    ],
    ids=["some-missing", "all-missing", "spaces", "empty", "number", "built-in", "last"],
)
def test_invalid_backends_are_not_registered(backend: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        register(backend)
    assert message in str(raised.value)
    assert not registry._added


# --- what a plug-in may do to others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True], ids=["in place", "by .data"])
def test_a_plugin_that_writes_into_its_inputs_harms_no_other(hidden: bool) -> None:
    """All candidates share the tensors of a trial."""
    written = []

    def write(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        result = manual.run(q, k, v, problem, **tensors)
        with torch.no_grad():
            (q.data if hidden else q).zero_()
        written.append(q)
        return result

    members: dict[str, Any] = {"name": "planted", "version": lambda: "1", "refusals": lambda problem: []}
    writer: Any = SimpleNamespace(**members, workspace_bytes=lambda problem: 0, flops=lambda problem: 1, run=write)
    register(writer)
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(*qkv(), Dense())[0])
    assert torch.equal(q, qkv()[0])
    assert written
    found = explain(q, k, v)
    assert status(found, "planted") in ("failed", "incorrect")
    entries = Quarantine(cache_folder(), silicon(q.device)).entries()
    assert {each.backend for each in entries} <= {"planted"}
    assert status(found, "sdpa") in ("chosen", "slower", "tie", "not_measured")


# --- imports of entry points that fail, exit, hang or crash -----------------------------------------------------------


WORKS = """
from attn_dispatch.backends import manual
name, version, refusals, workspace_bytes, run = (
    "plug", lambda: "1", manual.refusals, manual.workspace_bytes, manual.run
)
"""
COUNTED = "with open(__file__ + '.imports', 'a') as file: file.write('x')\n"
FAILING = {
    "error": ("raise ValueError('no')", "ValueError: no"),
    "missing": ("import nowhere_at_all", "ModuleNotFoundError"),
    "exit": ("raise SystemExit(3)", "raised SystemExit: 3"),
    "interrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "nothing": ("", "lacks name, version"),
    "hangs": ("import time\nwhile True: time.sleep(0.001)", "did not return within 0.3 s"),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Install a distribution whose entry point is a module with this code; returns the file that counts its imports."""
    site = tmp_path / "site"
    package = site / "made_up-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[attn_dispatch.backends]\nplug = plugged_in\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(candidates, "timeout_s", lambda: 0.3)  # of plug-ins alone
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)

    def made(code: str) -> Path:
        path = site / "plugged_in.py"
        path.write_text(COUNTED + code)
        return path.with_name(path.name + ".imports")

    yield made
    registry._load.cache_clear()
    sys.modules.pop("plugged_in", None)


def entries() -> list[Entry]:
    return Quarantine(cache_folder(), silicon("cpu")).entries()


@short
@pytest.mark.parametrize(("code", "reason"), FAILING.values(), ids=FAILING)
def test_a_failing_import(
    code: str, reason: str, install: Callable[[str], Path], warnings: Callable[[], list[str]]
) -> None:
    """It is tried once in a process, and one warning names the entry point and its distribution."""
    imports = install(code)
    for length in (16, 24):
        q, k, v = qkv(length)
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    (text,) = warnings()
    assert text.startswith("backend 'plug' (entry point plugged_in of made-up 1) ")
    assert reason in text
    assert imports.read_text() == "x"
    with pytest.raises(InvalidInput, match="entry point plugged_in of made-up 1"):
        attend(*qkv(), backend="plug")


@short
def test_an_import_that_hangs_is_left_out_by_later_processes(
    install: Callable[[str], Path], warnings: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    imports = install(FAILING["hangs"][0])
    attend(*qkv())
    (entry,) = entries()
    assert (entry.backend, entry.version, entry.kind, entry.strikes) == ("import of plug", "made-up 1", "hung", 1)
    process_state.forget_all()
    attend(*qkv(24))
    assert imports.read_text() == "x"
    assert "lift 'import of plug'" in warnings()[-1]
    assert main(["doctor", "--lift", "import of plug"]) == 0
    assert capsys.readouterr().out.startswith("lifted    import of plug made-up 1 on ")
    imports.with_suffix("").write_text(WORKS)
    process_state.forget_all()
    assert any(row.backend == "plug" and row.status != "failed" for row in explain(*qkv()).candidates)


@short
@pytest.mark.full
def test_an_import_that_crashes_is_left_out_by_later_processes(install: Callable[[str], Path]) -> None:
    imports = install("import os; os.abort()")
    code = "import torch, attn_dispatch\nx = torch.ones(1, 16, 1, 8)\nattn_dispatch.attend(x, x, x)\nprint('done')"
    code = "import os, sys; sys.path.insert(0, os.environ['PYTHONPATH'])\n" + code
    for _ in range(2):
        assert processes.run(code).returncode < 0
    done = processes.run(code)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert imports.read_text() == "xx"
    (entry,) = entries()
    assert (entry.backend, entry.kind) == ("import of plug", "died")
    assert "import of plug made-up 1 ran the entry point plugged_in for the first time" in entry.reason
