"""Predictions of `plan` against the bytes that ranks send, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import Sharded, attend, shard
from attn_dispatch.cli import main
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.ring.engine.exchange import Transport
from attn_dispatch.ring.engine.parts import solver
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.ring.engine.steps import steps_of
from attn_dispatch.ring.link import link_of
from attn_dispatch.ring.plan.counts import CountedProblem
from attn_dispatch.ring.plan.forecast import forecasts_over, peak_memory_of, refusal
from attn_dispatch.ring.plan.schedule import RankSpeed, seconds
from attn_dispatch.ring.rows.layout import CONTIGUOUS, ZIGZAG, Layout, deal
from attn_dispatch.spec.orders import EXCHANGES, GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.address import Address
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from attn_dispatch.testing.allocations import allocated_peak
from tests.support import ring_ranks
from tests.support.entries import decision
from tests.support.pairwise import thinned
from tests.support.ring_ranks import Ranks

CPU = torch.device("cpu")
RANKS = 4
Case = tuple[Pattern, str, tuple[int, int], torch.dtype, tuple[float, ...] | None]
CASES: tuple[Case, ...] = (
    (Dense(is_causal=True), ZIGZAG, (4, 4), torch.float32, None),
    (Dense(), CONTIGUOUS, (8, 4), torch.bfloat16, (1.0, 3.0, 2.0, 2.0)),
    (Window(20, 5), CONTIGUOUS, (4, 1), torch.float32, None),
    (Window(20, 0, 8), ZIGZAG, (4, 2), torch.float32, None),
    (Dilated((16, 64, 256), (1, 2, 4), is_causal=True), CONTIGUOUS, (16, 16), torch.float32, None),
    (Dilated((24, 100), (1, 3)), ZIGZAG, (4, 2), torch.float64, None),
    (Dilated((16, 32), (1, 4)), CONTIGUOUS, (4, 4), torch.float32, None),
    (Neighborhood((16, 16), (5, 3)), CONTIGUOUS, (4, 4), torch.float32, None),
    (Neighborhood((16, 16), (6, 4), edges="shift", stride=(3, 4)), CONTIGUOUS, (4, 4), torch.float32, None),
)
TOKENS = 256
WIDE = Dilated((2048, 16384, 131_072, 1_048_576), (1, 4, 16, 64))


def counted_for(case: Case, ranks: int, backward: bool) -> CountedProblem:
    """With `backward` gradients through out and lse."""
    pattern, kind, (heads, kv_heads), dtype, weights = case
    problem = problem_of((2, TOKENS, heads, 8), pattern, dtype, CPU, kv_heads=kv_heads, backward=backward)
    layout = Layout(deal(TOKENS, ranks, weights and weights[:ranks]), kind)
    return CountedProblem.of(replace(problem, return_lse=backward, ranks=ranks), layout)


def served(ranks: int) -> list[tuple[Case, str, bool, list[tuple[int, int]]]]:
    """The bytes predicted in every case for every exchange that can serve."""
    found = []
    for case, backward in product(CASES, (False, True)):
        counted = counted_for(case, ranks, backward)
        usable = [each for each in EXCHANGES if not refusal(counted, each)]
        found += [(case, each, backward, [counted.bytes_sent(rank, each) for rank in range(ranks)]) for each in usable]
    return found


def sent_by_this_rank(ranks: int) -> list[tuple[int, int]]:
    """A job: the bytes that this rank sends, forward and backward, as `served` lists them."""
    return [_sent(case, ranks, exchange, backward) for case, exchange, backward, _ in served(ranks)]


def _sent(case: Case, ranks: int, exchange: str, backward: bool) -> tuple[int, int]:
    pattern, kind, (heads, kv_heads), dtype, weights = case
    mesh = Sharded(ring_ranks.group(), kind, weights and weights[:ranks])
    whole = (torch.randn(2, TOKENS, h, 8, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    q, k, v = (shard(x, mesh).requires_grad_(backward) for x in whole)
    transport = link_of(mesh.mesh).transport
    transport.bytes_sent = 0
    result = attend(q, k, v, pattern, mesh=mesh, order=exchange, return_lse=backward)
    forward = transport.bytes_sent
    if backward:
        torch.autograd.backward(list(result), [torch.ones_like(x) for x in result])
    return forward, transport.bytes_sent - forward


@thinned("size", [2, RANKS], 2)
def test_predicted_bytes_are_those_that_ranks_send(size: int, ranks: Ranks, set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    found, expected = ranks.everywhere(sent_by_this_rank, size, ranks=size), served(size)
    for number, (*case, predicted) in enumerate(expected):
        assert [each[number] for each in found] == predicted, case
    assert {(exchange, backward) for _, exchange, backward, _ in expected} == set(product(EXCHANGES, (False, True)))


# --- schedule ---------------------------------------------------------------------------------------------------------


def counted_of(
    pattern: Pattern, tokens: int, ranks: int, *, backward: bool = False, kind: str = CONTIGUOUS
) -> CountedProblem:
    problem = problem_of((1, tokens, 4, 8), pattern, torch.float32, CPU, backward=backward)
    return CountedProblem.of(problem, Layout(deal(tokens, ranks), kind))


@pytest.mark.parametrize("exchange", [RING, GATHER, ULYSSES])
def test_time_is_computing_or_sending_where_the_other_takes_none(exchange: str) -> None:
    counted = counted_of(Dense(), 1024, 4, backward=True)
    work = 1024**2 * 4 * 8 * 14 / 4
    assert seconds(counted, exchange, RankSpeed(1.0, 1e30)) == pytest.approx(work)
    assert seconds(counted, exchange, RankSpeed(1e30, 1.0)) == pytest.approx(sum(counted.bytes_sent(0, exchange)))


def test_a_ring_overlaps_sending_and_compute() -> None:
    """Four equal steps of compute, three messages: each step takes as long as the longer of the two."""
    counted = counted_of(Dense(), 1024, 4)
    step = 256**2 * 4 * 8 * 4.0
    message = 256 * 4 * counted.row_bytes
    for link, expected in ((2.0, 4 * step), (0.5, 3 * 2 * step + step)):
        speed = RankSpeed(1.0, link * message / step)
        assert seconds(counted, RING, speed) == pytest.approx(max(expected, 4 * step))
    assert seconds(counted, GATHER, RankSpeed(1.0, 0.5 * message / step)) == pytest.approx(3 * 2 * step + 3 * step)


def test_zigzag_balances_causal_work() -> None:
    """Contiguous shards wait for the last rank, which has about twice the mean."""
    whole = seconds(counted_of(Dense(is_causal=True), 1024, 1), LOCAL, RankSpeed(1.0, 1.0))
    times = {
        kind: seconds(counted_of(Dense(is_causal=True), 1024, 4, kind=kind), GATHER, RankSpeed(1.0, 1e30))
        for kind in (CONTIGUOUS, ZIGZAG)
    }
    assert times[CONTIGUOUS] == pytest.approx(whole * 7 / 16, rel=0.01)
    assert times[ZIGZAG] == pytest.approx(whole / 4, rel=0.01)


# --- memory -----------------------------------------------------------------------------------------------------------


MEASURED = json.loads((Path(__file__).parents[2] / "tools/results/ring.json").read_text(encoding="utf-8"))["memory"]


@pytest.mark.parametrize(
    "one",
    [one for one in MEASURED if one["ranks"] > 1],
    ids=lambda one: f"{one['pattern']}-{one['ranks']}-{one['backward']}",
)
def test_the_bound_of_memory_holds_what_ranks_took(one: dict[str, Any]) -> None:
    """By `python -m tools.bench.ring memory`."""
    pattern = Dense() if one["pattern"].startswith("Dense") else WIDE
    shape = 1, one["tokens"], one["heads"], 64
    problem = problem_of(shape, pattern, torch.float32, CPU, backward=one["backward"])
    counted = CountedProblem.of(problem, Layout(deal(one["tokens"], one["ranks"])))
    bound = max(peak_memory_of(counted, one["exchange"], rank).peak_bytes for rank in range(one["ranks"]))
    assert one["peak_bytes"] <= bound <= 2 * one["peak_bytes"]


@thinned("case", CASES, 2, lambda case: str(case[0]))
def test_predicted_buffers_are_those_that_the_engine_reserves(case: Case) -> None:
    for backward, exchange, rank in product((False, True), (RING, GATHER), range(RANKS)):
        counted, transport = counted_for(case, RANKS, backward), Transport(None)
        RingCall(counted.problem, steps_of(counted.problem, counted.layout, rank, exchange), transport).reserve()
        reserved = sum(buffer.nbytes for buffer in transport.buffers.values())
        assert peak_memory_of(counted, exchange, rank).buffer_bytes == reserved, (exchange, backward, rank)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_single_rank_is_that_of_one_device(backward: bool) -> None:
    """q, k, v and out, with gradients of all four; no buffers and no sums in another dtype."""
    problem = problem_of((1, 1 << 16, 8, 64), Dilated((2048, 4096), (1, 2)), torch.bfloat16, CPU, backward=backward)
    (local, *others) = forecasts_over(problem, Layout((1 << 16,)), None)
    assert all(each.memory is None for each in others)
    assert local.memory is not None
    tensors = (8 if backward else 4) * (1 << 16) * 8 * 64 * 2
    assert local.memory.peak_bytes == tensors + solver(problem).workspace_bytes(problem)
    assert (local.memory.input_bytes, local.memory.buffer_bytes) == (3 * (1 << 16) * 8 * 64 * 2, 0)


# --- the command ------------------------------------------------------------------------------------------------------

HALF_A_BILLION = "--tokens 512M --segments 2k,64M --dilations 1,32k --dtype bf16 --rate 200 --link 50 --device cpu"
SMALL = "--tokens 64k --heads 8 --kv-heads 4 --causal --layout zigzag --backward --link 10 --device cpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], words: str) -> tuple[str, str]:
    assert main(["plan", *words.split()]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_plan_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = planned(capsys, f"{HALF_A_BILLION} --ranks 32,64 --json")
    found = json.loads(out)
    assert found["rate"] == {"operations": 2e14, "source": "--rate", "key": None}
    assert (found["problem"]["q_len"], found["link_bytes_per_s"]) == (2**29, 5e10)
    for plan, ranks in zip(found["plans"], (32, 64)):
        assert (plan["ranks"], sum(plan["tokens"])) == (ranks, 2**29)
        assert [each["exchange"] for each in plan["exchanges"]] == list(EXCHANGES)
        local, ring, gather, _ = plan["exchanges"]
        assert not local["serves"]
        assert local["seconds"] is None
        assert "key rows of other ranks" in local["reason"]
        assert ring["serves"]
        assert ring["reason"] == ""
        assert ring["shipped_bytes"] == gather["shipped_bytes"] == ring["forward_bytes"] > 0
        assert ring["tokens_per_s"] == pytest.approx(2**29 / ring["seconds"])
        assert ring["memory"].keys() == {"input_bytes", "buffer_bytes", "peak_bytes"}
        assert plan["fastest"] in EXCHANGES


def test_tables_of_all_tokens_are_not_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even to find the keys that no query sees, which this pattern has."""
    words = "--tokens 1M --segments 2k,64k --dilations 2,64 --ranks 8 --rate 200 --link 50 --device cpu"
    _, peak = allocated_peak(lambda: planned(capsys, words))
    assert peak < 2**20


def test_plan_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = planned(capsys, f"{SMALL} --ranks 1:4 --rate 0.1")
    rows = [line.split() for line in out.splitlines()]
    table = [row for row in rows if len(row) > 1 and row[1] in EXCHANGES]
    assert [row[:2] for row in table] == [[ranks, each] for ranks in ("1", "2", "4") for each in EXCHANGES]
    assert sum(row[-1] == "fastest" for row in table) == 3
    assert "predicted, not measured" in out
    assert max(map(len, out.splitlines())) <= 160


def test_the_rate_is_that_of_the_nearest_decision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, ms in ((1024, 1.0), (16384, 100.0)):
        problem = problem_of((1, length, 8, 64), Dense(is_causal=True), torch.float32, CPU, kv_heads=4, backward=True)
        store_decision(folder, problem, ms)
    out, err = planned(capsys, f"{SMALL} --ranks 4 --json")
    rate = json.loads(out)["rate"]
    assert rate["operations"] == pytest.approx(8 * 16384 * 16385 / 2 * 64 * 14 / 0.1)
    assert "100 ms" in rate["source"]
    assert not err


def test_a_call_that_is_mostly_overhead_gives_no_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = problem_of((1, 16, 2, 8), Dense(is_causal=True), torch.float32, CPU, kv_heads=2, backward=True)
    store_decision(folder, problem, 5.0)
    out, err = planned(capsys, f"{SMALL} --ranks 4 --json")
    assert json.loads(out)["rate"] is None
    assert "no time is predicted" in err


def store_decision(folder: Path, problem: Problem, median_ms: float) -> None:
    row, plain = Row(backend="sdpa", order="natural", status="chosen", median_ms=median_ms), problem.to_dict()
    address = Address.of(plain, silicon(problem.device))._asdict()
    assert Store(folder).put(decision(problem=plain, candidates=(row,), title=str(problem), **address))


def test_without_a_rate_there_is_no_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = planned(capsys, f"{SMALL} --ranks 4 --json")
    found = json.loads(out)
    assert found["rate"] is None
    assert all(each["seconds"] is None for each in found["plans"][0]["exchanges"])
    assert found["plans"][0]["exchanges"][1]["shipped_bytes"]
    assert "give --rate, or measure with 'attn-dispatch profile --shape 1,8k,8/4,64 --dtype float32'" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 4 --link 1", "--tokens N"),
        ("--tokens 4k --grid 64,64 --window 3 --ranks 4 --link 1", "not both"),
        ("--tokens 2 --ranks 4 --link 1 --rate 1", "2 tokens over 4 ranks"),
        ("--tokens 4k --ranks 4 --link 0", "expected a number > 0, got '0'"),
        ("--tokens 4k --ranks 4", "--link"),
        ("--tokens 4k --ranks 4 --link 1 --dtype fp16,fp32", "--dtype takes one"),
        ("--tokens 4k --ranks 4 --link 1 --segments 4", "--segments and --dilations go together"),
        ("--tokens 4k --kv-heads 3 --ranks 4 --link 1", "heads of k and v must divide"),
    ],
)
def test_wrong_usage(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["plan", *words.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
