"""Trials over a mesh: every rank runs every candidate, in rounds; a call's time is that of its slowest rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput, RankLost
from attn_dispatch.kernels.contract import Backend, Result
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.log import logger
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.machine.load import NO_LOAD, Load
from attn_dispatch.ring.link import Link
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.ring.sharded_problem import NAME, ShardedProblem
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.orders import LOCAL
from attn_dispatch.spec.problem import CONTIGUOUS, Problem
from attn_dispatch.store.decision import Row
from attn_dispatch.text import one_line, titled
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.clocks import Stopwatch
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.hard_cases import fitted
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import exhausted, warned_if_long

MOST_ROUNDS, FEWEST_ROUNDS = 9, 3
SMALL = 192  #: tokens of the problem that the gate compares with float64
SMALL_BATCH = 2


class FailedOnRanks(Exception):
    """A call that raised on some ranks; the text says on which, and what."""


@dataclass
class SlowestRank(Stopwatch):
    """A stopwatch over ranks: all make the call, and the time of the slowest counts. `load` and the clock `spent_s`, in
    seconds, are the same on all ranks too, and so is every decision of a race by them.
    """

    link: Link
    device: torch.device
    spent_s: float = 0.0
    load: Load = NO_LOAD
    shortest_ms: float = 0.0  #: a call between ranks is never repeated within a sample

    def mean_ms(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Milliseconds of a call; a collective.

        Raises:
            FailedOnRanks: it raised on a rank. RankLost: a rank has exited, or did not answer in time.
        """
        self.link.barrier()
        start, error = time.perf_counter(), None
        try:
            call()
            synchronize(self.device)
        except RankLost:
            raise
        except Exception as raised:  # noqa: BLE001 - any error is sent to all ranks
            error = one_line(raised)
        found = self.link.all_gather_objects((error, (time.perf_counter() - start) * 1e3))
        if failed := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]:
            raise FailedOnRanks("; ".join(failed))
        slowest_ms = max(took_ms for _, took_ms in found)
        self.spent_s += slowest_ms / 1e3
        return slowest_ms


@dataclass(frozen=True)
class _Exchanges(Backend):
    """The exchanges as orders of a backend, of a rank's shard of q, k and v."""

    sharded: ShardedProblem
    name: str = field(default=NAME, init=False)

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = LOCAL, **masks: Any) -> Result:
        masks.pop("pattern_data", None)  # `sharded` holds it
        out, lse = self.sharded.run(order, q, k, v, **masks)
        return out if lse is None else (out, lse)


class _OfWhole(_Exchanges):
    """The same of whole tensors: out and lse are zero at the other ranks' tokens."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = LOCAL, **masks: Any) -> Result:
        masks.pop("pattern_data", None)
        at = positions_of(self.sharded.layout, self.sharded.link.rank).to(q.device)
        q_at, k_at, v_at = (x.index_select(1, at) for x in (q, k, v))
        if "key_mask" in masks:
            masks["key_mask"] = masks["key_mask"].index_select(1, at)
        out, lse = self.sharded.run(order, q_at, k_at, v_at, **masks)
        assert lse is not None
        zeros = q.new_zeros(q.shape), lse.new_zeros(*lse.shape[:2], q.shape[1])
        return zeros[0].index_copy(1, at, out), zeros[1].index_copy(2, at, lse)


@dataclass
class Trial:
    """One trial; every method is a collective and has the same result on every rank.

    Args:
        tensors: q, k and v of this rank, which are not written to. masks: `seq_lens` and `key_mask`, if given.
    """

    sharded: ShardedProblem
    tensors: tuple[Tensor, Tensor, Tensor]
    masks: Mapping[str, Tensor]
    found: dict[str, Row] = field(default_factory=dict[str, Row])

    def rows(self, names: Sequence[str], first: str, budget_ms: float) -> tuple[dict[str, Row], str | None, float]:
        """A row for each candidate, the chosen one (None if all failed), and the milliseconds of the trial.

        Args:
            first: the incumbent, replaced only by a candidate that is proven faster.
        """
        start, warned = time.perf_counter(), self.sharded.link.rank > 0
        watch = SlowestRank(self.sharded.link, self.sharded.problem.device)
        runners = dict[str, tuple[Candidate, Admitted]]()
        backend = _Exchanges(self.sharded)
        for name in names:
            candidate = Candidate(backend, name, str(torch.__version__))
            try:
                runners[candidate.title] = candidate, self._admitted(candidate, watch)
            except FailedOnRanks as error:
                self._failed(candidate, error)
            warned = warned or warned_if_long(self.sharded.problem, time.perf_counter() - start)
        race = Race(Request(self.sharded.problem, ""), runners, titled(NAME, first), lambda: watch.spent_s)
        race.stopwatch, race.most_rounds = watch, MOST_ROUNDS
        round_s = sum(admitted.call_ms for _, admitted in runners.values()) / 1e3
        exhausted(race.run(self._call, max(budget_ms / 1e3, FEWEST_ROUNDS * round_s)))
        self.sharded.link.transport.release()  # buffers of other exchanges
        chosen = race.choose()
        for title, (candidate, _) in runners.items():
            if (raised := race.rounds.failures.get(title)) is not None:
                self._failed(candidate, raised)
            elif (row := race.row(candidate)) is not None:
                self.found[candidate.order] = row
        order = None if chosen is None else runners[chosen][0].order
        return self.found, order, (time.perf_counter() - start) * 1e3

    def _failed(self, candidate: Candidate, error: Exception) -> None:
        logger.warning("%s failed in a trial: %s", candidate.order, error)
        self.found[candidate.order] = candidate.measured_row("failed", str(error))

    def _admitted(self, candidate: Candidate, watch: SlowestRank) -> Admitted:
        """Check a small problem of this kind against float64, then make a first call of the problem itself.

        Raises:
            FailedOnRanks: it raised on a rank, or its results are wrong.
        """
        error = self._compared(candidate.order, watch)
        watch.mean_ms(partial(self.sharded.reserve, candidate.order))
        first_ms = watch.mean_ms(self._call(candidate))
        return Admitted(first_ms, first_ms, None, error)

    def _compared(self, name: str, watch: SlowestRank) -> float:
        """The error of a small problem of this kind over all ranks; infinite where there is none to compare."""
        ranks, found = self.sharded.layout.ranks, dict[str, Tensor]()
        if ranks > SMALL:  # fewer than one token per rank
            logger.info("%s is not compared with float64: %d ranks for a problem of %d tokens", name, ranks, SMALL)
            return math.inf
        sharded, oracle = _small(self.sharded)
        watch.mean_ms(lambda: found.update(oracle.run(_OfWhole(sharded), name)))
        reduce = sharded.link.all_reduce
        verdict = oracle.check({name: reduce(x.to(sum_dtype(x.dtype))).to(x.dtype) for name, x in found.items()})
        if verdict.failures:
            raise FailedOnRanks("; ".join(verdict.failures))
        return verdict.error

    def _call(self, candidate: Candidate) -> Callable[[], Sequence[Tensor]]:
        """A call of this rank's shard."""
        problem = self.sharded.problem
        q, k, v = (x.detach().requires_grad_(problem.needs_grad) for x in self.tensors)
        grad = torch.ones_like(q) if problem.needs_grad else None
        return Example(problem, q, k, v, grad, dict(self.masks)).call(*candidate.backend_and_order)


def _small(sharded: ShardedProblem) -> tuple[ShardedProblem, Oracle]:
    """A small problem of the same kind over the same ranks, and its oracle."""
    problem, layout = sharded.problem, sharded.layout
    pattern = fitted(problem.pattern, SMALL)
    pattern.check(SMALL, SMALL)
    pattern, batch = pattern.simplify(SMALL, SMALL, problem.heads), min(problem.batch, SMALL_BATCH)
    small = replace(problem, pattern=pattern, batch=batch, q_len=SMALL, k_len=SMALL)
    small = replace(small, return_lse=True, strides=CONTIGUOUS)
    try:
        lengths = deal(SMALL, layout.ranks, layout.lengths)
    except InvalidInput:  # in these proportions a rank would have no token
        lengths = deal(SMALL, layout.ranks)
    example = make(replace(small, ranks=1))
    held = held_of(small, example.masks)
    return replace(sharded, problem=small, layout=Layout(lengths, layout.kind), held=held), Oracle.of(example)


def held_of(problem: Problem, tensors: Mapping[str, Tensor]) -> Held | None:
    """The pattern of a problem with these tensors, where it holds some."""
    whole = problem.pattern.bound(tensors.get("pattern_data"))
    return Held.of(whole, problem.heads, problem.kv_heads) if isinstance(whole, DataPattern) else None
