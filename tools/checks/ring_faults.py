"""Faults injected into real ranks, from fixed seeds: does a rank ever hang, and is a result ever wrong?

Ranks are killed (kill -9) and stopped (SIGSTOP) from outside at random moments, or by themselves amid an exchange; one
of them asks for something else than the others; a part of one's work raises, or finds no memory, in a call or in the
trials before it. Every rank must answer within the group's time-out and some grace; what it returns is compared with
float64, and after a fault that a group survives so is another call. Times are not measured here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_dispatch import GroupMismatch, InvalidInput, Problem, RankLost, Sharded, attend
from attn_dispatch.ring import link
from attn_dispatch.ring.engine.exchange import PendingExchange, Transport
from attn_dispatch.ring.engine.parts import Part
from attn_dispatch.ring.rows.layout import CONTIGUOUS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tools.lib.ranks import join

RANKS, TOKENS, HEADS, HEAD_DIM = 3, 512, 3, 32
TIMEOUT_S, GRACE_S = 5.0, 5.0
START_S = 120.0  #: seconds for starting processes and their first call
TRIAL_TIMEOUT_S = 60.0  #: in trials, where ranks work longer between collectives
PAUSE_S = 0.5  #: seconds that a rank is stopped where it continues in time
REPEATS, SPAN_S = 8, 0.4  #: calls during which an external fault happens, and the seconds within which it does
BUDGET_MS = "100"  #: of trials
CASES: tuple[tuple[Pattern, str, str], ...] = (
    (Dense(is_causal=True), ZIGZAG, "ring"),
    (Dense(), CONTIGUOUS, "gather"),
    (Dilated((64, 128, 512), (1, 2, 4)), CONTIGUOUS, "gather"),
    (Dilated((48, 512), (1, 3), is_causal=True), ZIGZAG, "ring"),
    (Window(100, 0), CONTIGUOUS, "ring"),
    (Neighborhood((16, 32), (5, 7)), CONTIGUOUS, "ring"),
    (Dense(), CONTIGUOUS, "ulysses"),
)
#: Number of faults of each kind, of 200.
SHARES = {"kill": 40, "stop": 25, "pause": 20, "mismatch": 45, "memory": 25, "exception": 25, "trial": 20}
IN_PARTS = ("memory", "exception", "trial")
STATUSES = ("right", "not a number", "wrong")  #: of a call that returned, the worst last
MISMATCHES = ("causal", "scale", "dtype", "heads", "batch", "order", "lse", "invalid")


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in a call.

    Args:
        kind: one of `SHARES`, or "none".
        case: number of the problem in `CASES`.
        at: the exchange or the part in which it happens, counted from 0. A kill or a stop then comes from within;
            None: from outside, `moment_s` after the call was requested.
        backward: whether gradients are computed, too.
        late: it happens in the backward pass. Where a rank fails in the forward pass and gradients are required, the
            others go on to wait for it.
        what: how a call differs from the others'.
    """

    kind: str
    case: int
    victim: int = -1
    at: int | None = None
    moment_s: float = 0.0
    backward: bool = True
    late: bool = False
    what: str = ""


def faults(count: int, seed: int) -> list[Fault]:
    """`count` faults in the proportions of `SHARES`, in random order."""
    draw = random.Random(seed)
    whole = sum(SHARES.values())
    kinds = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * count / whole)))]
    draw.shuffle(kinds)
    kinds.sort(key="trial".__eq__)  # last: they use a separate group
    return [_fault(kind, draw) for kind in kinds]


def _fault(kind: str, draw: random.Random) -> Fault:
    able = [number for number, (_, _, exchange) in enumerate(CASES) if kind not in IN_PARTS or exchange != "ulysses"]
    found = Fault(kind, draw.choice(able), draw.randrange(RANKS))
    if kind in ("kill", "stop", "pause"):
        within = CASES[found.case][2] != "ulysses" and draw.random() < 0.5
        return replace(found, at=draw.randrange(4) if within else None, moment_s=draw.random() * SPAN_S)
    if kind == "mismatch":
        return replace(found, what=draw.choice(MISMATCHES))
    if kind == "trial":
        return replace(found, at=draw.randrange(40))
    backward, late = draw.choices(((False, False), (True, True), (True, False)), (9, 9, 2))[0]
    return replace(found, at=draw.randrange(4), backward=backward, late=late)


# --- a rank -----------------------------------------------------------------------------------------------------------


def serve(rank: int, folder: str, timeout_s: float, pipe: Connection) -> None:
    """Answer calls until the parent closes the connection."""
    torch.set_num_threads(1)
    os.environ["ATTN_DISPATCH_BUDGET_MS"] = BUDGET_MS
    join(rank, RANKS, folder, timeout_s)
    with suppress(EOFError):
        while True:
            number, fault = pipe.recv()
            # An empty folder each time, so that each call has a trial.
            with tempfile.TemporaryDirectory() as cache:
                os.environ["ATTN_DISPATCH_CACHE_DIR"] = cache
                pipe.send((number, _answer(rank, fault)))


def _answer(rank: int, fault: Fault) -> tuple[str, str]:
    """One of `STATUSES`, or "raised", with the error."""
    os.environ["ATTN_DISPATCH_MODE"] = "tune" if fault.kind == "trial" else "off"
    if fault.kind == "trial":
        link.forget()
    outside = fault.kind in ("kill", "stop", "pause") and fault.at is None
    worst = "right", ""
    try:
        with _struck(fault, rank) if not fault.late else nullcontext():
            for _ in range(REPEATS if outside else 1):
                worst = max(worst, _call(rank, fault), key=lambda each: STATUSES.index(each[0]))
    except Exception as error:  # noqa: BLE001 - any error is a result here
        return "raised", type(error).__name__
    return worst


def _call(rank: int, fault: Fault) -> tuple[str, str]:
    pattern, kind, exchange = CASES[fault.case]
    gate = gates()[fault.case]
    assert gate.grad is not None
    at = positions_of(Layout(deal(TOKENS, RANKS), kind), rank)
    example, grad = gate.example, gate.grad.index_select(1, at)
    q, k, v = (x.detach().index_select(1, at).requires_grad_() for x in (example.q, example.k, example.v))
    order: str | None = None if fault.kind == "trial" else exchange
    arguments: dict[str, Any] = {"order": order, "return_lse": True, "mesh": Sharded("world", kind)}
    if fault.kind == "mismatch" and rank == fault.victim:
        q, k, v, pattern = _other(fault.what, q, k, v, pattern, arguments)
    out, lse = attend(q, k, v, pattern, **arguments)
    found = {"out": out.detach(), "lse": lse.detach()}
    if fault.backward:
        with _struck(fault, rank) if fault.late else nullcontext():
            found.update(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), grad)))
    for name, x in found.items():
        expected = gate.expected[name]
        if bool(x.isnan().any()):
            return "not a number", name
        should = expected.value.index_select(2 if name == "lse" else 1, at)
        off = torch.where(x == should, 0.0, (x.double() - should).abs()).max()
        if not off <= expected.tolerance:
            return "wrong", f"{name} off by {float(off):.2e}"
    return "right", ""


def _other(what: str, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, arguments: dict[str, Any]) -> Any:
    """The same call with one argument changed."""
    if what == "causal":
        pattern = Dense(is_causal=pattern != Dense(is_causal=True))
    elif what == "scale":
        arguments["scale"] = 0.5
    elif what == "order":
        arguments["order"] = "ring" if arguments["order"] == "gather" else "gather"
    elif what == "lse":
        arguments["return_lse"] = False
    elif what == "dtype":
        q, k, v = (x.double() for x in (q, k, v))
    elif what == "heads":
        q, k, v = (x[:, :, :1] for x in (q, k, v))
    elif what == "batch":
        q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    else:
        k = k[:, 1:]
    return q, k, v, pattern


@contextmanager
def _struck(fault: Fault, rank: int) -> Iterator[None]:
    """The fault inside the victim's process."""
    if fault.at is None or rank != fault.victim:
        yield
    elif fault.kind in IN_PARTS:
        error = RuntimeError("injected") if fault.kind == "exception" else torch.OutOfMemoryError("injected")
        with mock.patch.object(Part, "call", _before(Part.call, fault.at, lambda: _raise(error))):
            yield
    else:
        with mock.patch.object(Transport, "exchange", _amid(Transport.exchange, fault.at, fault.kind)):
            yield


def _before(call: Callable[..., Any], at: int, strike: Callable[[], None]) -> Callable[..., Any]:
    """The function, with an action before its `at`-th call."""
    calls = iter(range(2**62))

    def struck(*arguments: Any) -> Any:
        if next(calls) == at:
            strike()
        return call(*arguments)

    return struck


def _amid(exchange: Callable[..., PendingExchange], at: int, kind: str) -> Callable[..., PendingExchange]:
    """The exchange, whose `at`-th time is under way when the signal comes."""
    calls = iter(range(2**62))

    def struck(*arguments: Any) -> PendingExchange:
        pending = exchange(*arguments)
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return pending

    return struck


def _raise(error: Exception) -> None:
    raise error


@cache
def gates() -> list[Oracle]:
    """What should come out, in every row; worked out once, for all ranks."""
    path = os.environ.get("RING_FAULT_GATES")
    if path:
        found: list[Oracle] = pickle.loads(Path(path).read_bytes())
        return found
    meta = torch.empty(1, TOKENS, HEADS, HEAD_DIM, device="meta", requires_grad=True)
    return [Oracle.of(make(Problem.of(meta, meta, meta, pattern, device="cpu"))) for pattern, _, _ in CASES]


# --- a group ----------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """A group of ranks, until a fault ends it."""

    folder: str
    timeout_s: float = 0.0
    calls: int = 0
    ranks: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def start(self, timeout_s: float) -> None:
        self.end()
        self.timeout_s = timeout_s
        meet = tempfile.mkdtemp(dir=self.folder)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tools.checks.ring_faults"])
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, meet, timeout_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(mine)

    def end(self) -> None:
        for process, pipe in zip(self.ranks, self.pipes):
            process.kill()
            process.join()
            pipe.close()
        self.ranks, self.pipes = [], []

    def answers(self, fault: Fault) -> list[tuple[str, str]]:
        """The result of each rank; "silent" after the time-out, "dead" if its process has ended."""
        timeout_s = TRIAL_TIMEOUT_S if fault.kind == "trial" else TIMEOUT_S
        if not self.ranks or (fault.kind != "none" and timeout_s != self.timeout_s):
            self.start(timeout_s)
            # What takes time only once is not to be waited for later.
            first = self._call(Fault("none", 0), START_S)
            if any(status != "right" for status, _ in first):
                raise RuntimeError(f"a new group's first call: {first}")
        return self._call(fault, self.timeout_s + GRACE_S)

    def _call(self, fault: Fault, within_s: float) -> list[tuple[str, str]]:
        self.calls += 1
        for pipe in self.pipes:
            pipe.send((self.calls, fault))
        if fault.kind in ("kill", "stop", "pause"):
            self._signals(fault)
        until = time.monotonic() + within_s
        others = [rank for rank in range(RANKS) if fault.kind != "stop" or rank != fault.victim]
        found = {rank: self._answer(rank, until) for rank in others}
        if fault.kind == "stop":
            os.kill(self.ranks[fault.victim].pid, signal.SIGCONT)
            found[fault.victim] = self._answer(fault.victim, time.monotonic() + within_s)
        return [found[rank] for rank in range(RANKS)]

    def _signals(self, fault: Fault) -> None:
        pid = self.ranks[fault.victim].pid
        if fault.at is None:
            time.sleep(fault.moment_s)
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.kind == "pause":
            # One that stops by itself may not have come to it yet: what comes before it stops wakes no one.
            until = time.monotonic() + TIMEOUT_S
            while not _stopped(pid) and not self.pipes[fault.victim].poll(0.01) and time.monotonic() < until:
                pass
            time.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)

    def _answer(self, rank: int, until: float) -> tuple[str, str]:
        try:
            while self.pipes[rank].poll(max(0.0, until - time.monotonic())):
                number, found = self.pipes[rank].recv()
                if number == self.calls:
                    return str(found[0]), str(found[1])
        except (EOFError, OSError):
            return "dead", ""
        return "silent", ""


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def unexpected(fault: Fault, answers: list[tuple[str, str]]) -> str:
    """Unexpected outcomes: a hang, a wrong result, a failure that is not reported or not survived."""
    for rank, (status, what) in enumerate(answers):
        victim = rank == fault.victim
        if status == "silent":
            return f"hang: rank {rank}"
        if status == "wrong":
            return f"wrong: rank {rank}, {what}"
        if status == "dead" and not (victim and fault.kind == "kill"):
            return f"died: rank {rank}"
        if fault.kind in ("none", "pause", "trial") and status != "right":
            return f"should be right: rank {rank}, {status} {what}"
        if fault.kind == "mismatch" and what not in (GroupMismatch.__name__, InvalidInput.__name__):
            return f"wrong: rank {rank} raised no mismatch, {status} {what}"
        if status == "raised" and fault.kind in ("kill", "stop") and what != RankLost.__name__:
            return f"should be RankLost: rank {rank}, {what}"
    return ""


def run(count: int = 200, seed: int = 0) -> dict[str, Any]:
    """Inject faults; returns the outcomes by kind."""
    outcomes: dict[str, Counter[str]] = {}
    faulty, groups, after = [], 0, 0
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        path = Path(folder, "gates")
        path.write_bytes(pickle.dumps(gates()))
        os.environ["RING_FAULT_GATES"] = str(path)
        group = Group(folder)
        try:
            for fault in faults(count, seed):
                groups += not group.ranks
                answers = group.answers(fault)
                bad = unexpected(fault, answers)
                survived = all(status != "dead" and what != RankLost.__name__ for status, what in answers)
                # A kill may come when all is done: the group is at its end all the same.
                if survived and fault.kind != "kill" and not bad:
                    after += 1
                    bad = unexpected(Fault("none", fault.case), group.answers(Fault("none", fault.case)))
                    bad = bad and f"afterwards, {bad}"
                else:
                    group.end()
                if bad:
                    faulty.append({"fault": str(fault), "what": bad})
                    print(faulty[-1], answers, flush=True)
                    group.end()
                for rank, (status, what) in enumerate(answers):
                    side = "victim" if rank == fault.victim else "others"
                    outcomes.setdefault(fault.kind, Counter())[f"{side}: {status} {what}".strip()] += 1
        finally:
            group.end()
    hangs = sum("hang" in each["what"] for each in faulty)
    wrong = sum("wrong" in each["what"] for each in faulty)
    counted = Counter(fault.kind for fault in faults(count, seed))
    return {
        "faults": sum(counted.values()), "seed": seed, "ranks": RANKS, "timeout_s": TIMEOUT_S, "grace_s": GRACE_S,
        "by_kind": dict(counted), "hangs": hangs, "wrong": wrong, "unexpected": faulty, "groups_started": groups,
        "right_afterwards": after, "answers": {kind: dict(each) for kind, each in outcomes.items()},
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=200, help="number of injected faults")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    found = run(arguments.faults, arguments.seed)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["unexpected"] else 0)


if __name__ == "__main__":
    main()
