"""Other libraries beside attend(), on the same inputs in the same rounds: times, errors against float64, memory, and
what each refuses.

    python -m tools.bench peers

Install the libraries without their dependencies, which would bring another torch:

    pip install --no-deps einops==0.8.2 hyper-connections local-attention==1.11.2 natten==0.21.7
    pip install --no-deps dilated-attention-pytorch==0.2.0 git+https://github.com/microsoft/torchscale

Each cell (a problem, length, dtype and pass) is a new process.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from attn_dispatch import explain, profile
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.machine.environment import installed
from attn_dispatch.machine.load import is_calm
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.text import gib, milliseconds, one_line, titled
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import parser, ratio, timing, write
from tools.lib.peer_calls import ATTEND, HEAD_DIM, PEERS, PROBLEMS, Cell, Peer, as_backend, peers_of
from tools.lib.tables import Table, direction, interval

TAKES = "15 minutes"
CELL_S = 150.0  #: seconds after which a cell's process is ended, and the peer that it was asking left out
PROFILED_S = 4.0  #: attend()'s measurement of a cell
ROUNDS_S, FEWEST, MOST = 4.0, 3, 15  #: seconds that rounds may fill, and their number
HOPELESS = 8.0  #: times the fastest: beyond it, a peer is timed only once after warm-up
DTYPES = ("float32", "bfloat16")
MISSING = "not installed"
Row = dict[str, Any]


def cells() -> Iterator[Cell]:
    for (name, asked), dtype, backward in product(PROBLEMS.items(), DTYPES, (False, True)):
        for tokens in asked.trained if backward else asked.tokens:
            yield Cell(name, tokens, dtype, backward)


def left_out(cell: Cell, versions: Mapping[str, str]) -> dict[str, str]:
    """Why peers are not asked, by name."""
    small = [peer for peer in PEERS if cell.tokens > peer.most_tokens]
    found = {peer.name: f"asked at up to {peer.most_tokens:,} tokens" for peer in small}
    return found | {name: version for name, version in versions.items() if version == MISSING}


def measured(cell: Cell, reasons: Mapping[str, str]) -> list[Row]:
    """The rows of a cell. A peer whose call ends the process, or does not end, gets that as its reason; the others are
    then asked again.
    """
    here, there = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=answer, args=(cell, reasons, there.send))
    process.start()
    there.close()
    asked, ended, end = "", f"after {CELL_S:g} s", time.monotonic() + CELL_S
    try:
        while here.poll(max(0.0, end - time.monotonic())):
            found: str | list[Row] = here.recv()
            if isinstance(found, list):
                return found
            asked = found
    except EOFError:
        process.join()
        ended = f"with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if not asked:
        raise RuntimeError(f"{cell}: the process ended {ended}")
    return measured(cell, {**reasons, asked: f"the process ended {ended}"})


def answer(cell: Cell, reasons: Mapping[str, str], send: Callable[[str | list[Row]], object]) -> None:
    """In a cell's process: send each peer's name before its first call, and the rows at last."""
    warnings.simplefilter("ignore")  # of compilers and deprecations: they say nothing about results
    send(rows_of(cell, reasons, send))


def rows_of(cell: Cell, reasons: Mapping[str, str], say: Callable[[str], object]) -> list[Row]:
    """A row for each peer that computes the problem: times, errors and memory, or the reason why there are none.

    Args:
        reasons: of those that are not asked, by name.
        say: called with a peer's name before its first call.
    """
    problem = cell.problem()
    example = make(problem)
    gate = Oracle.of(example)
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    warm_ms: dict[str, float] = {}
    for peer in peers_of(cell.name):
        row: Row = {**cell._asdict(), "pattern": str(problem.pattern), "heads": problem.heads, "peer": peer.name}
        rows[peer.name] = row = row | {"about": peer.about, "differs": peer.differs(problem)}
        if peer.name in reasons:
            row["reason"] = reasons[peer.name]
            continue
        say(peer.name)
        try:
            if peer.name == ATTEND:
                row |= measured_choice(example)
            backend = as_backend(peer.name, peer.make(problem))
            row |= checked(peer, backend, gate)
            call = example.call(backend)
            start = time.perf_counter()
            row["peak_bytes"] = peak_bytes(call, problem.device)[1]
            warm_ms[peer.name] = (time.perf_counter() - start) * 1e3
            calls[peer.name] = call
        except Exception as error:  # noqa: BLE001 - a peer may refuse in any way; the row says how
            row["reason"] = one_line(error)
    timed(rows, calls, warm_ms)
    return list(rows.values())


def measured_choice(example: Example) -> Row:
    """What attend() chose after a measurement."""
    profile([example.problem], budget_s=PROFILED_S, progress=False)
    found = explain(example.q, example.k, example.v, example.problem.pattern)
    choice = titled(str(found.choice), str(found.order))
    return {"choice": choice, "source": found.source, "provisional": found.provisional}


def checked(peer: Peer, backend: Backend, gate: Oracle) -> Row:
    """The first call in milliseconds, and its largest error: absolute against the formula in float64, or relative to
    the largest value against the peer's own result in float64, where it computes another function.
    """
    example, start = gate.example, time.perf_counter()
    found = gate.run(backend)
    row: Row = {"first_ms": (time.perf_counter() - start) * 1e3}
    if not peer.differs(example.problem):
        verdict, tolerance = gate.check(found), gate.expected["out"].tolerance
        return row | {"error": verdict.error, "tolerance": tolerance, "wrong": list(verdict.failures)}
    with torch.no_grad():
        exact: Any = backend.run(example.q.double(), example.k.double(), example.v.double(), example.problem)
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
        rows[name].update(time=timing(each), disturbed=found.load.disturbed)
        if name != ATTEND and ATTEND in found.timings:
            rows[name]["over_attend"] = ratio(each, found.timings[ATTEND])
    for name, error in found.failures.items():
        rows[name]["reason"] = one_line(error)


def tables(found: Any) -> Iterator[Table]:
    about = {row["peer"]: row["about"] for row in found["rows"]}
    yield Table(
        ("peer", "version", "what is called"),
        [(name, found["versions"][name], what) for name, what in about.items()],
        f"Batch 1, heads of {found['head_dim']}. Peers of a cell are timed in the same rounds, in a process of "
        "its own. The ratio is the median over rounds, with its interval; with fewer than 6 rounds its range. "
        "Errors of out are against float64; marked own: of a peer that computes another function, relative to "
        "its own result there. Memory is beyond the inputs; masks are made before. The first call includes "
        f"compilation; `attend()` had been profiled. A peer over {HOPELESS:g} times slower than the fastest is "
        "timed once. NATTEN, torchscale and dilated-attention-pytorch are made for GPUs: nothing follows about "
        "these.",
    )
    for name in dict.fromkeys(row["name"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["name"] == name]
        notes = [
            f"{peer} {what}." for peer, what in dict.fromkeys((row["peer"], row["differs"]) for row in rows) if what
        ]
        without = {row["peer"]: row["reason"].rstrip(".") for row in reversed(rows) if "time" not in row}
        notes += [f"Left out of some cells: {peer} ({reason})." for peer, reason in without.items()]
        head = ("tokens", "dtype", "pass", "peer", "time", "time / attend()'s", "error", "memory", "first call")
        about_it = " ".join((f"`{rows[-1]['pattern']}`, {rows[0]['heads']} heads.", *notes))
        yield Table(head, [_cells(row) for row in rows if "time" in row], about_it, name)


def _cells(row: Row) -> tuple[str, ...]:
    time, over = row["time"], row.get("over_attend")
    peer = f"attend(): `{row['choice']}`" if "choice" in row else row["peer"]
    ratio = "-" if over is None else interval(over) if time["rounds"] > 1 else f"{over['median']:.2f}, 1 round"
    error = f"{row['error']:.1e}{', own' * bool(row['differs'])}" + "".join(f"; WRONG: {each}" for each in row["wrong"])
    memory = "unknown" if row["peak_bytes"] is None else gib(row["peak_bytes"])
    took, first = (milliseconds(each) for each in (time["median_ms"], row["first_ms"]))
    return (f"{row['tokens']:,}", row["dtype"], direction(row), peer, took, ratio, error, memory, first)


def main() -> None:
    given = parser(__doc__, "peers.json").parse_args()
    calm, versions = is_calm(), {peer.name: installed(peer.distribution) or MISSING for peer in PEERS}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, ATTN_DISPATCH_CACHE_DIR=folder, ATTN_DISPATCH_MODE="tune"),
    ):
        rows = [row for cell in cells() for row in measured(cell, left_out(cell, versions))]
    write(given, {"head_dim": HEAD_DIM, "calm_before": calm, "versions": versions, "rows": rows}, tables)


if __name__ == "__main__":
    main()
