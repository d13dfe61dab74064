"""One cell of `python -m tools.bench peers`, in a process of its own.

    python -m tools.lib.peer_cells CELL FILE

CELL is JSON: the fields of `Cell`, `peers` to ask, and `left_out`, why others are not, by name. FILE gets the rows, and
before each peer's first call its name, so that a call which ends the process has one.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import explain, profile
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.machine.memory import available_bytes, peak_bytes
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib, one_line, titled
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import ratio, timing
from tools.lib.peer_calls import ATTEND, Call, Cell, Peer, peers_of

PROFILED_S = 4.0  #: attend()'s measurement of a cell
ROUNDS_S, FEWEST, MOST = 4.0, 3, 15  #: seconds that rounds may fill, and their number
HOPELESS = 8.0  #: times the fastest: beyond it, a peer is timed only once after warm-up
MEMORY = 0.6  #: share of the available memory that a peer may take
Row = dict[str, Any]


@dataclass(frozen=True)
class Wrapped(Backend):
    """A peer's call as a backend, as far as the oracle and examples ask for one."""

    name: str
    call: Call

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Tensor:
        return self.call(q, k, v)


def rows_of(cell: Cell, peers: Sequence[str], left_out: Mapping[str, str], say: Callable[[str], None]) -> list[Row]:
    """A row for each of these peers that computes the problem: times, errors and memory, or why there are none.

    Args:
        peers: names; attend() is always among those asked, for the ratios to its time.
        say: called with a peer's name before its first call.
    """
    problem = cell.problem()
    example = make(problem)
    gate = Oracle.of(example)
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    warm_ms: dict[str, float] = {}
    for peer in peers_of(cell.name):
        if peer.name != ATTEND and peer.name not in peers:
            continue
        row: Row = {**cell._asdict(), "pattern": str(problem.pattern), "heads": problem.heads, "peer": peer.name}
        rows[peer.name] = row = row | {"about": peer.about, "differs": peer.differs(problem)}
        reason = left_out.get(peer.name) or too_large(peer, problem)
        if reason:
            row["reason"] = reason
            continue
        say(peer.name)
        try:
            if peer.name == ATTEND:
                row |= measured_choice(example)
            wrapped = Wrapped(peer.name, peer.make(problem))
            row |= checked(peer, wrapped, gate)
            call = example.call(wrapped)
            start = time.perf_counter()
            row["peak_bytes"] = peak_bytes(call, problem.device)[1]
            warm_ms[peer.name] = (time.perf_counter() - start) * 1e3
            calls[peer.name] = call
        except Exception as error:  # noqa: BLE001 - a peer may refuse in any way; the row says how
            row["reason"] = one_line(error)
    timed(rows, calls, warm_ms)
    return list(rows.values())


def too_large(peer: Peer, problem: Problem) -> str:
    need, free = peer.bytes(problem), available_bytes(problem.device)
    return f"needs about {gib(need)}, over {MEMORY:.0%} of the {gib(free)} free" if need > MEMORY * free else ""


def measured_choice(example: Example) -> Row:
    """What attend() chose after a measurement."""
    profile([example.problem], budget_s=PROFILED_S, progress=False)
    found = explain(example.q, example.k, example.v, example.problem.pattern)
    choice = titled(str(found.choice), str(found.order))
    return {"choice": choice, "source": found.source, "provisional": found.provisional}


def checked(peer: Peer, wrapped: Wrapped, gate: Oracle) -> Row:
    """The first call in milliseconds, and its largest error: absolute against the formula in float64, or relative to
    the largest value against the peer's own result in float64, where it computes another function.
    """
    example, start = gate.example, time.perf_counter()
    found = gate.run(wrapped)
    row: Row = {"first_ms": (time.perf_counter() - start) * 1e3}
    if not peer.differs(example.problem):
        verdict = gate.check(found)
        return row | {
            "error": verdict.error,
            "tolerance": gate.expected["out"].tolerance,
            "wrong": list(verdict.failures),
        }
    with torch.no_grad():
        exact = wrapped.call(example.q.double(), example.k.double(), example.v.double())
    error = float((found["out"].double() - exact).abs().max() / exact.abs().max())
    return row | {"error": error, "tolerance": None, "wrong": []}


def timed(rows: Mapping[str, Row], calls: dict[str, Callable[[], object]], warm_ms: Mapping[str, float]) -> None:
    """Time the calls in interleaved rounds, and add to each row its times and their ratio to attend()'s."""
    if not calls:
        return
    fastest = min(warm_ms.values())
    round_s = sum(each for each in warm_ms.values() if each <= HOPELESS * fastest) / 1e3
    rounds = max(FEWEST, min(MOST, int(ROUNDS_S / round_s)))
    found = time_in_rounds(
        calls, budget_s=None, min_rounds=rounds, max_rounds=rounds, hopeless=HOPELESS, margin=0.0, first_ms=warm_ms
    )
    for name, each in found.timings.items():
        rows[name]["time"] = timing(each)
        if name != ATTEND and ATTEND in found.timings:
            rows[name]["over_attend"] = ratio(each, found.timings[ATTEND])
    for name, error in found.failures.items():
        rows[name]["reason"] = one_line(error)
    for name in calls:
        rows[name]["disturbed"] = found.load.disturbed


def main() -> None:
    warnings.simplefilter("ignore")  # of compilers and deprecations: they say nothing about results
    given, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    cell = Cell(*given["cell"])

    def say(name: str) -> None:
        path.write_text(json.dumps({"asked": name}))

    rows = rows_of(cell, given["peers"], given["left_out"], say)
    path.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
