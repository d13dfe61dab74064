"""What `plan` predicts, against what ranks really ship, and the command from outside."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from attn_dispatch import Sharded, attend, shard
from attn_dispatch.order import EXCHANGES
from attn_dispatch.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.problem import Problem
from attn_dispatch.profiling import problem_of
from attn_dispatch.ring.counting import counts_of
from attn_dispatch.ring.freight import Freight, Load, freight_of, why_not
from attn_dispatch.ring.layout import CONTIGUOUS, ZIGZAG, Layout, deal
from attn_dispatch.ring.link import link_of

CPU = torch.device("cpu")
RANKS = 4
Case = tuple[Pattern, str, tuple[int, int], torch.dtype, tuple[float, ...] | None]
CASES: tuple[Case, ...] = (
    (Dense(is_causal=True), ZIGZAG, (4, 4), torch.float32, None),
    (Dense(), CONTIGUOUS, (8, 4), torch.bfloat16, (1.0, 3.0, 2.0, 2.0)),
    (Window(20, 5), CONTIGUOUS, (4, 1), torch.float32, None),
    (Dilated((16, 64, 256), (1, 2, 4), is_causal=True), CONTIGUOUS, (16, 16), torch.float32, None),
    (Dilated((24, 100), (1, 3)), ZIGZAG, (4, 2), torch.float64, None),
    (Dilated((16, 32), (1, 4)), CONTIGUOUS, (4, 4), torch.float32, None),
    (Neighborhood((16, 16), (5, 3)), CONTIGUOUS, (4, 4), torch.float32, None),
)
TOKENS = 256


def problem_for(case: Case, ranks: int, backward: bool, lse: bool) -> tuple[Problem, Layout]:
    pattern, kind, (heads, kv_heads), dtype, weights = case
    problem = problem_of((2, TOKENS, heads, 8), pattern, dtype, CPU, kv_heads=kv_heads, backward=backward)
    shares = weights if weights is None else weights[:ranks]
    return Problem(**{**vars_of(problem), "return_lse": lse, "ranks": ranks}), Layout(deal(TOKENS, ranks, shares), kind)


def vars_of(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in Problem.__dataclass_fields__ if name != "_hash"}


def served(case: Case, ranks: int) -> list[tuple[str, bool, list[Freight]]]:
    """What is predicted of every exchange that serves, forward and with backward through out and lse."""
    found = []
    for backward in (False, True):
        problem, layout = problem_for(case, ranks, backward, lse=backward)
        load = Load(problem, layout, counts_of(problem.pattern, layout, problem.heads, problem.kv_heads))
        found += [(each, backward, freight_of(load, each)) for each in EXCHANGES if not why_not(load, each)]
    return found


def work(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ATTN_DISPATCH_MODE="off")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for case in CASES:
        for ranks, group in ((RANKS, dist.group.WORLD), (2, pairs[rank // 2])):
            for exchange, backward, _ in served(case, ranks):
                found.append(shipped(case, ranks, group, exchange, backward))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def shipped(case: Case, ranks: int, group: Any, exchange: str, backward: bool) -> tuple[int, int]:
    """Bytes that this rank sends, forward and backward."""
    pattern, kind, (heads, kv_heads), dtype, weights = case
    mesh = Sharded(group, kind, None if weights is None else weights[:ranks])
    whole = (torch.randn(2, TOKENS, h, 8, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    q, k, v = (shard(x, mesh).requires_grad_(backward) for x in whole)
    wire = link_of(mesh.mesh).wire
    wire.shipped = 0
    result = attend(q, k, v, pattern, mesh=mesh, order=exchange, return_lse=backward)
    forward = wire.shipped
    if backward:
        torch.autograd.backward(list(result), [torch.ones_like(x) for x in result])
    return forward, wire.shipped - forward


def test_bytes_are_those_that_ranks_ship(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(work, (port, str(tmp_path)), nprocs=RANKS)  # type: ignore[no-untyped-call]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    expected = [(case, ranks, each) for case in CASES for ranks in (RANKS, 2) for each in served(case, ranks)]
    exchanges = set()
    for number, (case, ranks, (exchange, backward, freight)) in enumerate(expected):
        exchanges.add((exchange, backward))
        for rank in range(RANKS):
            mine = freight[rank % ranks if ranks == 2 else rank]
            assert seen[rank][number] == [mine.forward, mine.backward], (case, ranks, exchange, backward, rank)
    assert exchanges == {(each, backward) for each in EXCHANGES for backward in (False, True)}


def test_one_rank_ships_nothing() -> None:
    for exchange, _, freight in served(CASES[0], 1):
        assert freight == [Freight(0, 0)], exchange
