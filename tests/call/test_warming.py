"""`warm`: after it no call compiles, in this process or a new one; and what `ATTN_DISPATCH_COMPILE=never` refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch._dynamo.utils import counters as of_torch

from attn_dispatch import Window, attend, counters, profile, record, register, warm
from attn_dispatch.errors import BackendFailed, InvalidInput, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.device_cache import refuse_compiling
from attn_dispatch.kernels.native import library
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.bundle import write_bundle
from attn_dispatch.store.decision import Decision, Row, from_elsewhere
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request, current_environment
from tests.support.calls import forget, forget_all, forget_native_library, formula, qkv
from tests.support.commands import command, plain
from tests.support.compiling import compiled
from tests.support.planted import Planted
from tests.support.processes import printed, run

PATTERN = Window(7, 0)
TITLE = "[1, 16, 2, 8]   float32   Window(left=7, right=0)   forward"


def problem(length: int = 16) -> Problem:
    return Problem.of(*qkv(length), PATTERN)


def decision(of: Problem, backend: str, order: str = NATURAL) -> Decision:
    """One by which calls run with this backend."""
    row = Row(backend=backend, order=order, status="chosen", version=registry.load(backend).version(), median_ms=1.0)
    return Request.of(of).decision((backend, order), "measured", [row], environment=current_environment())


def decide(of: Problem, backend: str, order: str = NATURAL) -> Decision:
    found = decision(of, backend, order)
    assert Store(cache_folder()).put(found)
    return found


@pytest.fixture
def planted() -> Planted:
    found = Planted()
    register(found)
    decide(problem(), found.name)
    return found


# --- which problems ---------------------------------------------------------------------------------------------------


def test_each_decision_runs_once(planted: Planted) -> None:
    (row,) = warm(progress=False)
    assert (row.problem, row.backend, row.order, row.reason) == (TITLE, "planted", "natural", "")
    assert planted.seen == [problem()]
    assert 0 < row.seconds < 60
    attend(*qkv(), PATTERN)
    assert planted.calls == 2
    assert counters() == dict.fromkeys(counters(), 0) | {"loaded": 1}  # by `warm`


def test_problems_of_a_record_and_of_an_export(planted: Planted, tmp_path: Path) -> None:
    recorded, exported = tmp_path / "met.jsonl", tmp_path / "decisions.json"
    with record(recorded):
        attend(*qkv(), PATTERN)
    exported.write_bytes(write_bundle([decision(problem(), "manual")]))  # of which the problem alone is taken
    for file in (recorded, str(exported)):
        assert [row.backend for row in warm(file, progress=False)] == ["planted"]
    for content in (None, b"{}\n", b'{"schema"'):
        path = tmp_path / "no such file" if content is None else recorded
        _ = content is None or path.write_bytes(content)
        with pytest.raises(InvalidInput, match=str(path)):
            warm(path)


def test_undecided_problems_are_named_once_the_others_are_warm(planted: Planted) -> None:
    rows: list[Any] = []
    with pytest.raises(NotDecided) as raised:
        warm([problem(17), problem(), problem(18)], progress=False, report=rows.append)
    first, *lines = str(raised.value).splitlines()
    assert first == "2 of 3 problems are not warm:"
    assert [line.split("]")[0] for line in lines] == ["  [1, 17, 2, 8", "  [1, 18, 2, 8"]
    assert all(line.endswith(": not decided: `attn-dispatch profile` measures it") for line in lines)
    assert [row.backend for row in rows] == ["", "planted", ""]
    assert counters()["measured"] == 0


def test_a_backend_that_fails_keeps_no_other_from_getting_warm(
    planted: Planted, set_mode: Callable[[str], None]
) -> None:
    broken = Planted(lambda *_, **__: 1 / 0, name="broken")  # type: ignore[arg-type]
    register(broken)
    decide(problem(15), "broken")
    set_mode("locked")  # in others, calls would measure the new one at the other problem
    with pytest.raises(BackendFailed, match=r"1 of 2 problems are not warm:\n.* broken failed: ZeroDivisionError"):
        warm([problem(15), problem()], progress=False)
    assert planted.calls == 1


def test_what_cannot_run_any_more_is_not_decided(planted: Planted) -> None:
    planted.edition = "2"
    with pytest.raises(NotDecided):
        warm(progress=False)
    assert planted.calls == 0


@pytest.mark.parametrize("mode", ["tune", "locked"])
def test_decisions_of_other_machines(
    mode: str, planted: Planted, set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked where calls would check them, however many there are."""
    own = decision(problem(19), "native")
    Store(cache_folder()).put(from_elsewhere(own, "imported"))
    monkeypatch.setenv("ATTN_DISPATCH_TRIAL_SECONDS", "0")
    set_mode(mode)
    assert {row.backend for row in warm(progress=False)} == {"planted", "native"}
    assert counters()["imported"] == 1
    forget()
    attend(*qkv(19), PATTERN)
    assert counters()["imported"] == 1


def test_what_is_no_problem_is_named() -> None:
    for wrong in (3, [problem(), "x"]):
        with pytest.raises(InvalidInput, match=r"problems must be Problems, or a file .*, got [3'x]+$"):
            warm(wrong)  # type: ignore[arg-type]


def test_the_mode_off_reads_no_decision(set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    with pytest.raises(InvalidInput, match="'off'"):
        warm()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(planted: Planted, tmp_path: Path) -> None:
    planted_row = {"problem": TITLE, "backend": "manual", "order": "natural", "reason": ""}
    own = decide(problem(), "manual")
    ranks = msgspec.structs.replace(own, key="a" * 20, problem={**own.problem, "ranks": 2})
    elsewhere = msgspec.structs.replace(own, silicon="cpu-other-1c-1t")
    for each in (ranks, elsewhere):
        Store(cache_folder()).put(each)
    folder = cache_folder()
    found = plain(command(folder, "warm", "--json", ATTN_DISPATCH_MODE="locked"))
    (row,) = found["warmed"]
    assert row.pop("seconds") > 0
    assert row == planted_row
    assert sorted(found["left_out"].values()) == [1, 1]
    assert found["folders"]["ATTN_DISPATCH_CACHE_DIR"] == str(folder)
    done = command(folder, "warm", ATTN_DISPATCH_MODE="locked")
    assert done.returncode == 0
    assert "left out  1 of cpu-other-1c-1t, which is not this machine with its threads\n" in done.stdout
    assert "1 of 1 problems are warm\n" in done.stdout
    (file := tmp_path / "met.jsonl").write_text(json.dumps(problem(20).to_dict()))
    done = command(folder, "warm", str(file))
    assert (done.returncode, "not decided: `attn-dispatch profile` measures it" in done.stdout) == (1, True)
    assert "0 of 1 problems are warm\n" in done.stdout
    done = command(tmp_path / "empty", "warm")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no problem of this machine is in {tmp_path / 'empty'}" in done.stderr
    assert command(folder, "warm", "no such file").returncode == 2


# --- what a process has compiled --------------------------------------------------------------------------------------


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "locked")
    monkeypatch.setenv("ATTN_DISPATCH_COMPILE", "never")


REFUSED = r"\$ATTN_DISPATCH_COMPILE is never, .*{}.*: call attn_dispatch.warm\(\) when it starts"


@pytest.mark.usefixtures("never", "uncompiled_flex")
@pytest.mark.parametrize("order", ["natural", "residue"])
def test_flex_compiles_in_no_call(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    decide(of := Problem.of(*qkv(), **pattern), "flex", order)
    for _ in range(2):
        with pytest.raises(NotDecided, match=REFUSED.format("flex_attention")):
            attend(*qkv(), **pattern)
    warm([of], progress=False)
    attend(*qkv(), **pattern)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    with pytest.raises(NotDecided):  # other strides are other inputs
        attend(q, k, v, **pattern, backend="flex", order=order)
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "predict")
    attend(*qkv(18), **pattern, backend="flex")


@pytest.mark.usefixtures("never")
def test_native_compiles_in_no_call(copying_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Path(f"{copying_compiler.parents[1] / 'c++'}.log")
    with pytest.raises(NotDecided, match=REFUSED.format("native")):
        attend(*qkv(), PATTERN, backend="native")
    assert not log.exists()
    decide(problem(), "native")
    warm(progress=False)
    compiled_by = log.read_text()
    assert (cache_folder() / "native" / library._file()).exists()
    attend(*qkv(), PATTERN)
    forget_all()  # and in another process
    forget_native_library()
    attend(*qkv(), PATTERN)
    assert log.read_text() == compiled_by != ""


@pytest.mark.usefixtures("never", "short_trials")
def test_trials_compile(copying_compiler: Path) -> None:
    profile([problem()], budget_s=0.1, progress=False)
    assert Path(f"{copying_compiler.parents[1] / 'c++'}.log").exists()


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_COMPILE", "no")
    with pytest.raises(InvalidInput, match=r"\$ATTN_DISPATCH_COMPILE must be one of always, never, got 'no'"):
        refuse_compiling("anything")


# --- compiled code, counted -------------------------------------------------------------------------------------------

CALL = """
import torch, attn_dispatch as a
from torch._dynamo.utils import counters
generator = torch.Generator().manual_seed(16)
q, k, v = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
out = a.attend(q, k, v, a.Window(7, 0))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"], out.double().sum().item())
"""


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_flex_finds_what_warm_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process nothing is traced, in a new one nothing compiled: no file of the compiler's is new."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    decide(problem(), "flex")
    (row,) = plain(command(cache_folder(), "warm", "--json", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor")))[
        "warmed"
    ]
    assert row["backend"] == "flex"
    graphs = of_torch["stats"]["unique_graphs"]
    expected = formula(*qkv(), PATTERN)[0].sum().item()
    assert attend(*qkv(), PATTERN).double().sum().item() == pytest.approx(expected, abs=1e-4)
    assert of_torch["stats"]["unique_graphs"] == graphs > 0
    libraries = {path: path.stat().st_mtime_ns for path in (tmp_path / "inductor").rglob("*.main.so")}  # no probes
    assert libraries
    miss, hit, total = printed("-W", "ignore", "-c", CALL).split()
    assert (miss, hit) == ("0", "1")
    assert float(total) == pytest.approx(expected, abs=1e-4)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "inductor").rglob("*.main.so")} == libraries


TRITON = """
import os, torch
from tools.bench import host

host.as_cuda()
os.environ["TRITON_CACHE_DIR"] = os.environ["KEPT"]
from triton import knobs
from attn_dispatch.backends import triton
from attn_dispatch.errors import NotDecided
from attn_dispatch.kernels.device_cache import compiling
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of

found, refused = {True: 0, False: 0}, 0
def heard(*, cache_hit, **more):
    found[cache_hit] += 1
knobs.compilation.listener = heard
wide = torch.randn(1, 64, 4, 17, dtype=torch.bfloat16)
for x in (wide[..., :16].contiguous(), wide[..., 1:]):  # of the second, addresses and strides are odd
    problem = problem_of(x.shape, Dense(), x.dtype, host.CUDA)
    try:
        triton.run(x, x, x, problem)
    except NotDecided as error:
        refused += "Triton's kernel forward" in str(error)
    with compiling():
        triton.run(x, x, x, problem)
    triton.run(x, x, x, problem)
print(refused, found[False], found[True])
"""


@pytest.mark.full
@pytest.mark.usefixtures("never")
@compiled
def test_triton_compiles_once_and_in_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own compiler and launcher on a driver that does nothing: a kernel for two kinds of addresses."""
    monkeypatch.setenv("KEPT", str(tmp_path / "triton"))
    one, other = (run(TRITON) for _ in range(2))
    assert (one.stdout.split(), one.stderr) == (["2", "2", "0"], "")
    assert other.stdout.split() == ["2", "0", "2"]
