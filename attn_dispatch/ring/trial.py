"""Trials over a mesh: every rank runs every candidate, in rounds; a call's time is that of its slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_dispatch import settings
from attn_dispatch.errors import InvalidInput, RankLost
from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.log import logger
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.ring.sharded_problem import ShardedProblem
from attn_dispatch.spec.orders import EXCHANGES
from attn_dispatch.store.decision import Row
from attn_dispatch.text import one_line
from attn_dispatch.tuning import choice
from attn_dispatch.tuning.candidates import utc_now
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.hard_cases import fitted
from attn_dispatch.tuning.intervals import Timing
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import said_if_long

NAME = "ring"  #: the backend whose orders are the exchanges
MOST_ROUNDS, FEWEST_ROUNDS = 9, 3
SMALL = 192  #: tokens of the problem that the gate compares with float64
SMALL_BATCH = 2

Tensors = tuple[Tensor, Tensor, Tensor]


def version() -> str:
    """The version of torch, whose process groups the exchanges use."""
    return str(torch.__version__)


@dataclass
class Trial:
    """One trial; every method is a collective and has the same result on every rank.

    Args:
        names: the candidates. first: the incumbent, replaced only by a candidate that is proven faster.
        tensors: q, k and v of this rank, which are not written to. masks: `seq_lens` and `key_mask`, if given.
    """

    sharded: ShardedProblem
    names: Sequence[str]
    first: str
    tensors: Tensors
    masks: Mapping[str, Tensor]
    budget_ms: float
    found: dict[str, Row] = field(default_factory=dict[str, Row])
    first_ms: dict[str, float] = field(default_factory=dict[str, float])
    samples: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    errors: dict[str, float] = field(default_factory=dict[str, float])

    def rows(self) -> tuple[dict[str, Row], str | None, float]:
        """A row for each candidate, the chosen one (None if all failed), and the milliseconds of the trial."""
        start, said = time.perf_counter(), self.sharded.link.rank > 0
        for name in self.names:
            self._admit(name)
            said = said or said_if_long(self.sharded.problem, time.perf_counter() - start)
        self._race()
        self.sharded.link.transport.release()  # buffers of other exchanges
        entrants = [
            choice.Entrant(name, Timing(tuple(samples), self.first_ms[name]), rank=EXCHANGES.index(name))
            for name, samples in self.samples.items()
        ]
        chosen = None
        if entrants:
            chosen, outcomes = choice.choose(entrants, self.first, calls=int(settings.expected_calls()))
            for entrant in entrants:
                self.found[entrant.name] = self._measured(entrant, outcomes[entrant.name])
        return self.found, chosen, (time.perf_counter() - start) * 1e3

    def _admit(self, name: str) -> None:
        """Check a small problem of this kind against float64, then make a first call of the problem itself."""
        failed = self._compare(name) or self._together(name, lambda: self.sharded.reserve(name))
        if failed is None:
            start = time.perf_counter()
            failed = self._together(name, lambda: self._call(name))
            self.first_ms[name] = max(self.sharded.link.all_gather_objects((time.perf_counter() - start) * 1e3))
        if failed is None:
            self.samples[name] = []
        else:
            self.found[name] = Row(backend=NAME, order=name, status="failed", reason=failed, version=version())

    def _together(self, name: str, call: Callable[[], object]) -> str | None:
        """Run `call` on every rank; returns the errors of the ranks where it failed, or None.

        Raises:
            RankLost: a rank has exited, or did not answer in time.
        """
        error = None
        try:
            call()
        except RankLost:
            raise
        except Exception as raised:  # noqa: BLE001 - any error is sent to all ranks
            error = one_line(raised)
        errors = self.sharded.link.all_gather_objects(error)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if failed:
            logger.warning("%s failed in a trial: %s", name, "; ".join(failed))
        return "; ".join(failed) or None

    def _compare(self, name: str) -> str | None:
        """Compare a small problem of this kind over all ranks with float64; returns what is wrong, or None."""
        ranks = self.sharded.layout.ranks
        if ranks > SMALL:  # fewer than one token per rank
            logger.info("%s is not compared with float64: %d ranks for a problem of %d tokens", name, ranks, SMALL)
            return None
        sharded, gate = _small(self.sharded)
        results: dict[str, Tensor] = {}
        failed = self._together(name, lambda: results.update(_shard_results(sharded, gate, name)))
        if failed is not None:
            return failed
        verdict = gate.check(_whole_results(sharded, results))
        self.errors[name] = verdict.error
        return "; ".join(verdict.failures) or None

    def _call(self, name: str) -> None:
        q, k, v = (x.detach() for x in self.tensors)
        problem = self.sharded.problem
        if not problem.needs_grad:
            self.sharded.run(name, q, k, v, self.masks.get("seq_lens"), self.masks.get("key_mask"))
        else:
            with torch.enable_grad():
                inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
                out, _ = self.sharded.run(name, q, k, v, self.masks.get("seq_lens"), self.masks.get("key_mask"))
                gradients((out,), inputs, (torch.ones_like(out),))
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)

    def _race(self) -> None:
        """Time rounds of one call per candidate until the budget is spent; all ranks use the same times."""
        spent = 0.0
        for number in range(MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and spent > self.budget_ms:
                return
            for name in list(self.samples):
                self.sharded.link.barrier()
                start = time.perf_counter()
                failed = self._together(name, lambda name=name: self._call(name))  # type: ignore[misc]
                took = max(self.sharded.link.all_gather_objects((time.perf_counter() - start) * 1e3))
                spent += took
                if failed is None:
                    self.samples[name].append(took)
                else:
                    del self.samples[name]
                    self.found[name] = Row(backend=NAME, order=name, status="failed", reason=failed, version=version())

    def _measured(self, entrant: choice.Entrant, outcome: choice.Outcome) -> Row:
        timing = entrant.timing
        return Row(
            backend=NAME,
            order=entrant.name,
            status=outcome.status,
            reason=outcome.reason,
            version=version(),
            median_ms=timing.median_ms,
            low_ms=timing.low_ms,
            high_ms=timing.high_ms,
            fastest_ms=min(timing.samples_ms),
            first_ms=timing.first_ms,
            rounds=len(timing.samples_ms),
            ratio=outcome.ratio,
            ratio_low=outcome.ratio_low,
            ratio_high=outcome.ratio_high,
            break_even=outcome.break_even,
            error=self.errors.get(entrant.name),
            measured=utc_now(),
        )


def _small(sharded: ShardedProblem) -> tuple[ShardedProblem, Oracle]:
    """A small problem of the same kind over the same ranks, and its oracle."""
    problem, layout = sharded.problem, sharded.layout
    pattern = fitted(problem.pattern, SMALL)
    pattern.check(SMALL, SMALL)
    small = replace(
        problem, pattern=pattern.simplify(SMALL, SMALL, problem.heads), batch=min(problem.batch, SMALL_BATCH),
        q_len=SMALL, k_len=SMALL, return_lse=True, strides=("bnhd", "bnhd", "bnhd"),
    )  # fmt: skip
    try:
        lengths = deal(SMALL, layout.ranks, layout.lengths)
    except InvalidInput:  # in these proportions a rank would have no token
        lengths = deal(SMALL, layout.ranks)
    oracle = Oracle.of(make(replace(small, ranks=1)))
    return replace(sharded, problem=small, layout=Layout(lengths, layout.kind)), oracle


def _shard_results(sharded: ShardedProblem, gate: Oracle, exchange: str) -> dict[str, Tensor]:
    """This rank's results for its shard of the gate's example; a collective."""
    example, needs_grad = gate.example, sharded.problem.needs_grad
    at = positions_of(sharded.layout, sharded.link.rank).to(sharded.problem.device)
    seq_lens, key_mask = example.masks.get("seq_lens"), example.masks.get("key_mask")
    key_mask = None if key_mask is None else key_mask.index_select(1, at)
    with torch.set_grad_enabled(needs_grad):
        q, k, v = (x.detach().index_select(1, at).requires_grad_(needs_grad) for x in (example.q, example.k, example.v))
        out, lse = sharded.run(exchange, q, k, v, seq_lens, key_mask)
        assert lse is not None
        found = {"out": out.detach(), "lse": lse.detach()}
        if gate.grad is not None:
            results, weights = [out], [gate.grad.index_select(1, at)]
            if gate.grad_lse is not None:
                results, weights = [out, lse], [*weights, gate.grad_lse.index_select(2, at)]
            found.update(zip(("dq", "dk", "dv"), gradients(results, (q, k, v), weights)))
    return found


def _whole_results(sharded: ShardedProblem, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather the results of all ranks by position; a collective."""
    gathered = sharded.link.all_gather_objects({name: x.cpu() for name, x in results.items()})
    order = torch.cat([positions_of(sharded.layout, rank) for rank in range(sharded.layout.ranks)])
    whole = {}
    for name in results:
        axis = 2 if name == "lse" else 1
        parts = torch.cat([each[name] for each in gathered], axis)
        whole[name] = torch.empty_like(parts).index_copy_(axis, order, parts).to(sharded.problem.device)
    return whole
