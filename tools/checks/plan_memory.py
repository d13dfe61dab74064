"""The peak memory that `attn-dispatch plan` predicts, against that of real ranks on this machine's CPU.

    python -m tools.checks.plan_memory            # all of it, some minutes, to tools/results/plan_memory.json
    python -m tools.checks.plan_memory window     # cases whose names start so; others stay unchanged

Every figure is of the rank that takes most: resident memory above what was there before q, k and v were made.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from attn_dispatch import Dense, Dilated, Sharded, Window, attend
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.ring.link import link_of
from attn_dispatch.ring.plan.forecast import Forecast, forecasts_over
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tools.lib.common import parser, write
from tools.lib.ranks import freed_at_once
from tools.lib.tables import table

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)
WARM = 512  #: tokens of a warm-up call, for what is loaded once


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    pattern: Pattern
    shape: tuple[int, int, int, int]
    ranks: int
    kv_heads: int
    dtype: torch.dtype = torch.float32
    kind: str = "contiguous"

    def problem(self, backward: bool) -> Problem:
        return problem_of(self.shape, self.pattern, self.dtype, CPU, kv_heads=self.kv_heads, backward=backward)

    def forecasts(self, backward: bool) -> list[Forecast]:
        found = forecasts_over(self.problem(backward), Layout(deal(self.shape[1], self.ranks), self.kind), None)
        return [each for each in found if not each.reason]


ALIGNED = Dilated((1024, 65536), (1, 4), is_causal=True)
CASES = (
    Case("window", Window(255, 0), (1, 262144, 8, 64), 4, 8),
    Case("dense", Dense(), (32, 2048, 16, 64), 2, 16),
    Case("dense4", Dense(), (32, 2048, 16, 64), 4, 8),
    Case("causal", Dense(is_causal=True), (32, 2048, 16, 64), 4, 16, kind="zigzag"),
    Case("half", Dense(), (32, 2048, 16, 64), 4, 16, torch.bfloat16),
    Case("dilated", ALIGNED, (2, 65536, 16, 64), 4, 16),
    Case("local", Dilated((1024, 4096), (1, 4)), (2, 65536, 16, 64), 4, 16),
)


def work(rank: int, port: int, case: Case, exchange: str, backward: bool, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ATTN_DISPATCH_MODE="off")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks, timeout=TIMEOUT)
    run(case, WARM, exchange, backward)
    link_of("world").transport.release()
    dist.barrier()
    _, taken = peak_bytes(lambda: run(case, case.shape[1], exchange, backward, times=2), CPU)
    Path(folder, f"{rank}.json").write_text(json.dumps(taken))
    dist.destroy_process_group()


def run(case: Case, tokens: int, exchange: str, backward: bool, times: int = 1) -> None:
    """Several calls, since buffers persist between calls."""
    batch, _, heads, head_dim = case.shape
    length = deal(tokens, case.ranks)[dist.get_rank()]
    sizes = (heads, case.kv_heads, case.kv_heads)
    q, k, v = (torch.empty(batch, length, h, head_dim, dtype=case.dtype).fill_(0.5) for h in sizes)
    for x in (q, k, v):
        x.requires_grad_(backward)
    order: Any = None if tokens == WARM else exchange
    for _ in range(times):
        out = attend(q, k, v, case.pattern, mesh=Sharded("world", case.kind), order=order)
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        del out


def measured(case: Case, exchange: str, backward: bool) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (port, case, exchange, backward, folder)
        with freed_at_once():
            start_processes(work, arguments, nprocs=case.ranks)  # type: ignore[no-untyped-call]
        return max(int(json.loads(path.read_text())) for path in Path(folder).iterdir())


def compared(case: Case) -> list[dict[str, Any]]:
    """Every exchange, without and with backward."""
    found = []
    for backward in (False, True):
        for each in case.forecasts(backward):
            assert each.memory is not None
            sizes = {"predicted": each.memory.peak_bytes, "measured": measured(case, each.exchange, backward)}
            found.append({**about(case), "exchange": each.exchange, "backward": backward, **sizes})
            print(found[-1], flush=True)
    return found


def about(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "pattern": str(case.pattern),
        "shape": list(case.shape),
        "kv_heads": case.kv_heads,
        "dtype": str(case.dtype).removeprefix("torch."),
        "ranks": case.ranks,
        "shards": case.kind,
    }


def markdown(found: Any) -> str:
    """A row for each case and pass: predicted over measured, exchange by exchange."""
    head = ("pattern", "q", "key heads", "dtype", "ranks", "pass", "predicted / measured peak of a rank")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for case, backward in dict.fromkeys((one["case"], one["backward"]) for one in found["runs"]):
        several = [one for one in found["runs"] if (one["case"], one["backward"]) == (case, backward)]
        first = several[0]
        ratios = ", ".join(f"`{one['exchange']}` {one['predicted'] / one['measured']:.2f}" for one in several)
        ranks = f"{first['ranks']}, {first['shards']}"
        size, kind = " x ".join(map(str, first["shape"])), "forward + backward" if backward else "forward"
        rows.append((first["pattern"], size, str(first["kv_heads"]), first["dtype"], ranks, kind, ratios))
    return table(rows)


def main() -> None:
    arguments = parser(__doc__, "plan_memory.json")
    arguments.add_argument("cases", nargs="*", metavar="CASE")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # as in ranks: scratch memory depends on threads
    before = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    runs = {case.name: [one for one in before if one["case"] == case.name] for case in CASES}
    for case in CASES:
        if not options.cases or case.name.startswith(tuple(options.cases)):
            runs[case.name] = compared(case)
            write(options.output, {"runs": [one for several in runs.values() for one in several]})
    print(markdown({"runs": [one for several in runs.values() for one in several]}))


if __name__ == "__main__":
    main()
