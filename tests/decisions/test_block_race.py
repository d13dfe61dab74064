"""The race of blocks of Triton's kernels by its interpreter, with made-up times: what wins, is kept and is used."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import Explanation, attend, explain, process_state, profiling
from attn_dispatch.backends import triton
from attn_dispatch.cli import main
from attn_dispatch.decisions import block_race, kept_blocks
from attn_dispatch.decisions.block_race import BlockBackend, Outcome, race_blocks
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import BlockConfig
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.machine.load import NO_LOAD
from attn_dispatch.spec.pattern import Dense, Neighborhood
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning import race
from attn_dispatch.tuning.choice import Rejected
from attn_dispatch.tuning.gate import Gate
from tests.kernels.test_triton import fake_gpu, interpreted

CPU = torch.device("cpu")
TABLE, NARROW, SHORT = triton.INTERPRETED, BlockConfig(32, 64, 4, 1), BlockConfig(64, 32, 4, 1)
USE = "forward float32 ieee 16"

pytestmark = [interpreted, pytest.mark.usefixtures("triton_interpreter", "tiny")]


class Watch:
    """A stopwatch that knows the milliseconds of a call by its block; an exception is raised."""

    load = NO_LOAD

    def __init__(self, **ms: float | Exception) -> None:
        self.ms: dict[BlockConfig, float | Exception] = {TABLE: 2.0, NARROW: 2.0, SHORT: 2.0}
        self.ms |= {globals()[name.upper()]: value for name, value in ms.items()}
        self.samples = 0

    def __call__(self, device: torch.device, stepped: bool) -> Any:
        return self

    def mean_ms(self, call: Any, repeats: int = 1) -> float:
        self.samples += 1
        found = self.ms[inspect.getclosurevars(call.call).nonlocals["run"].__self__.block]
        if isinstance(found, Exception):
            raise found
        return found

    def device_ms(self, call: object) -> None:
        return None

    host_ms = cold_ms = device_ms


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny example, without hard cases: the interpreter is slow."""
    monkeypatch.setattr(block_race, "LENGTH", 64)
    monkeypatch.setattr(block_race, "HEADS", 1)
    hard_cases(monkeypatch, lambda block: None)
    yield
    triton.block_configs.cache_clear()


def hard_cases(monkeypatch: pytest.MonkeyPatch, found: Callable[[BlockConfig], Rejected | None]) -> None:
    def check(gate: Gate, candidate: Any, *, brief: bool) -> Any:
        return found(candidate.backend.block)
        yield

    monkeypatch.setattr(Gate, "check_hard_cases", check)


def problem(backward: bool = False, pattern: Any = None) -> Problem:
    return problem_of((1, 64, 2, 16), pattern or Dense(), torch.float32, CPU, backward=backward)


def raced(watch: Watch, monkeypatch: pytest.MonkeyPatch, **ran: Callable[..., Any]) -> Outcome:
    """The outcome of the forward kernel's race; `ran` replaces what a block runs."""
    for name, function in ran.items():
        monkeypatch.setattr(BlockBackend, name, function)
    monkeypatch.setattr(race, "stopwatch_of", watch)
    (outcome,) = race_blocks([problem()])
    return outcome


def preferred() -> BlockConfig:
    return triton.block_configs(triton.FORWARD, problem())[0]


def explained() -> Explanation:
    q = torch.randn(1, 64, 2, 16)
    return explain(q, q, q)


def test_the_fastest_block_is_kept_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(narrow=1.0)
    assert preferred() == TABLE
    outcome = raced(watch, monkeypatch)
    assert (outcome.use, outcome.dropped, outcome.changed) == (USE, {}, True)
    assert outcome.winner is not None
    assert outcome.winner.speedup == 2.0
    assert preferred() == NARROW
    assert triton.block_configs(triton.BACKWARD_Q, problem(backward=True))[0] == TABLE
    process_state.forget_all()  # another process
    assert preferred() == NARROW
    done = watch.samples
    assert race_blocks([problem(), problem()]) == []
    assert watch.samples == done > 0
    assert [path.name for path in (folder / "blocks").glob("*.json")] == [f"{silicon(CPU)}.json"]


def test_calls_run_in_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[BlockConfig] = []
    launch = triton._launch_block

    def noted(each: Any, block: BlockConfig, *rest: Any) -> None:
        launched.append(block)
        launch(each, block, *rest)

    raced(Watch(narrow=1.0), monkeypatch)
    monkeypatch.setattr(triton, "_launch_block", noted)
    q = torch.randn(1, 64, 2, 16)
    found = attend(q, q, q, backend="triton")
    assert launched == [NARROW]
    torch.testing.assert_close(found, attend(q, q, q, backend="manual"))


def test_each_kernel_has_a_race_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a backward pass are raced beside the blocks that the others have."""
    ran: list[dict[str, BlockConfig]] = []
    run = triton.run

    def noted(*tensors: Any, blocks: Any = None, **more: Any) -> Any:
        ran.append(blocks)
        return run(*tensors, blocks=blocks, **more)

    monkeypatch.setattr(triton, "run", noted)
    monkeypatch.setattr(race, "stopwatch_of", Watch(short=1.0))
    found = race_blocks([problem(backward=True), problem()])
    assert [outcome.use.split()[0] for outcome in found] == ["forward", "backward_q", "backward_kv"]
    assert {outcome.changed for outcome in found} == {True}
    assert all(len(blocks) == 1 for blocks in ran)
    there = problem(backward=True)
    assert {triton.block_configs(each, there)[0] for each in triton.kernels_for(there)} == {SHORT}


def test_a_block_that_is_not_surely_faster_does_not_replace_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = raced(Watch(narrow=1.99), monkeypatch)
    assert outcome.winner is not None
    assert (outcome.winner.rows, outcome.winner.speedup, outcome.changed) == (TABLE.rows, 1.0, False)
    assert "measured here" in triton.configuration(problem())


def test_a_wrong_block_cannot_win(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "attn_dispatch")
    run = BlockBackend.run

    def wrong(self: BlockBackend, *tensors: Any, **more: Any) -> Any:
        out, lse = run(self, *tensors, **more)
        return out + 0.01 * (self.block == NARROW), lse

    outcome = raced(Watch(narrow=1.0, short=1.5), monkeypatch, run=wrong)
    assert outcome.dropped.keys() == {str(NARROW)}
    assert "out is off by" in outcome.dropped[str(NARROW)]
    assert preferred() == SHORT
    assert f"{USE} in blocks of {NARROW} is dropped: out is off by" in caplog.text
    # It is this block that is ruled out, not the backend.
    assert "quarantined" not in str(explained())


def test_a_block_that_is_too_large_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    launch = triton._launch_block

    def limited(each: Any, block: BlockConfig, *rest: Any) -> None:
        if block == NARROW:
            raise errors.OutOfResources(2**20, 2**18, "shared memory")
        launch(each, block, *rest)

    monkeypatch.setattr(triton, "_launch_block", limited)
    outcome = raced(Watch(narrow=1.0, short=RuntimeError("no such instruction")), monkeypatch)
    assert outcome.dropped.keys() == {str(NARROW), str(SHORT)}
    assert "shared memory" in outcome.dropped[str(NARROW)]
    assert "no such instruction" in outcome.dropped[str(SHORT)]
    assert preferred() == TABLE


@pytest.mark.full
def test_without_a_right_block_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction")

    outcome = raced(Watch(), monkeypatch, run=failing)
    assert outcome.winner is None
    assert len(outcome.dropped) == 3
    assert not list((folder / "blocks").glob("*")) if (folder / "blocks").is_dir() else True
    assert preferred() == TABLE


def test_the_winner_passes_hard_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    hard_cases(monkeypatch, lambda block: Rejected("incorrect", "NaN in dq") if block == NARROW else None)
    outcome = raced(Watch(narrow=1.0, short=1.5), monkeypatch)
    assert outcome.dropped == {str(NARROW): "NaN in dq"}
    assert preferred() == SHORT


def test_other_kernels_are_raced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raced(Watch(narrow=1.0), monkeypatch)
    monkeypatch.setattr(support, "_digest", lambda: "other kernels")
    process_state.forget_all()
    assert preferred() == TABLE
    raced(Watch(short=1.0), monkeypatch)
    assert preferred() == SHORT


def test_a_kept_block_that_is_not_raced_is_not_used() -> None:
    winner = kept_blocks.Winner(3, 5, 4, 1, 9.0, "2026-01-01T00:00:00+00:00")
    kept_blocks.keep(silicon(CPU), triton.version(), {USE: winner})
    assert preferred() == TABLE
    assert "from the table" in triton.configuration(problem())


def test_a_damaged_file_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    raced(Watch(narrow=1.0), monkeypatch)
    (path,) = (folder / "blocks").glob("*.json")
    path.write_bytes(path.read_bytes().replace(b'"rows":32', b'"rows":64'))
    process_state.forget_all()
    assert preferred() == TABLE
    assert any(str(path) in each for each in warnings())


def test_a_folder_that_cannot_be_written_keeps_it_for_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    folder.mkdir()
    (folder / "blocks").write_text("a file")
    raced(Watch(narrow=1.0), monkeypatch)
    assert preferred() == NARROW
    assert any("raced blocks are not kept" in each for each in warnings())


def test_problems_that_triton_refuses_are_not_raced() -> None:
    assert race_blocks([problem(pattern=Neighborhood((8, 8), (3, 3)))]) == []


def test_explain_and_inspect_show_the_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"blocks    triton: forward {TABLE} (from the table)" in str(explained())
    raced(Watch(narrow=1.0), monkeypatch)
    assert explained().configurations == (f"triton: forward {NARROW} (measured here)",)
    main(["inspect"])
    assert f"{USE}: {NARROW}: 2.00 times as fast as the table's block" in capsys.readouterr().out
    main(["inspect", "--json"])
    (kept,) = json.loads(capsys.readouterr().out)["blocks"].values()
    assert kept["version"] == triton.version()
    assert (kept["winners"][USE]["rows"], kept["winners"][USE]["columns"]) == (32, 64)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_a_few_blocks_are_raced(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {(8, 0): 163, (9, 0): 227}.get(capability, 99) * 2**10
    fake_gpu(monkeypatch, capability, shared)
    there = problem_of((1, 8192, 8, head_dim), Dense(), dtype, torch.device("cuda", 0), backward=True)
    for each in triton.kernels_for(there):
        found = triton.raced_blocks(each, there)
        assert len(set(found)) == len(found) <= 7
        assert all(support.shared_bytes(each, there, block) <= shared for block in found)
        assert not found or found[0] == triton.block_configs(each, there)[0]


@pytest.mark.parametrize(("given", "forced"), [(["--full"], True), (["--blocks"], True), ([], False)])
def test_profile_races_first_and_measures_again(
    given: list[str], forced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CUDA alone; here the outcome is made up."""
    raced_problems: list[Problem] = []
    outcome = Outcome(USE, None, {}, changed=True)

    def made_up(problems: list[Problem], force: bool, report: Callable[[object], None]) -> list[Outcome]:
        raced_problems.extend(problems)
        report(outcome)
        return [outcome]

    asked: list[bool] = []
    monkeypatch.setattr(block_race, "race_blocks", made_up)
    monkeypatch.setattr(profiling, "profile", lambda problems, force, **_: asked.append(force))
    main(["profile", "--shape", "1,64,2,16", "--device", "cpu", *given])
    assert raced_problems == []
    assert asked == [forced]
    assert ("no block is right" in capsys.readouterr().err) == forced


def test_ranks_do_not_race(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["attn-dispatch"])
    assert main(["profile", "--blocks", "--shape", "1,64,2,16"]) != 0
    assert "--blocks races on one device" in capsys.readouterr().err
