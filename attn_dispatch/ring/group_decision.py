"""One decision for all ranks of a mesh: stored, static or measured, before any row is exchanged.

The time of a candidate is that of the slowest rank. A candidate that one rank cannot run, or that fails on one rank in
a trial, is ruled out on all. Every rank stores the same decision, under a fingerprint of all ranks' machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from attn_dispatch import settings
from attn_dispatch.decisions.decide import counted
from attn_dispatch.decisions.look_up import is_believed
from attn_dispatch.decisions.modes import decide_by_mode
from attn_dispatch.errors import GroupMismatch, NoBackend, NotDecided
from attn_dispatch.machine.hardware import provenance, silicon
from attn_dispatch.ring.rows.layout import deal
from attn_dispatch.ring.sharded_problem import NAME, ShardedProblem
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.orders import EXCHANGES, GATHER, LOCAL, RING
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Damaged, Decision, Row, decode, encode, time_of
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request

NOTHING_TO_EXCHANGE = "no rank sees another's rows: there is nothing to exchange"
MAX_REASONS = 2  #: in an error: those of ranks often differ only in numbers

#: A trial of these exchanges, the first the incumbent's name, within a limit in milliseconds: see `trial.Trial.rows`.
Measure = Callable[[Sequence[str], str, float], tuple[dict[str, Row], str | None, float]]


def decide_together(
    sharded: ShardedProblem,
    measure: Measure,
    exchange: str | None,
    *,
    force: bool = False,
    budget_ms: float | None = None,
) -> Decision:
    """The common decision of all ranks; a collective.

    Args:
        exchange: the forced one, which is then not measured; or None.
        force: measure in every mode, even if a decision is stored.
        budget_ms: for the trial; $ATTN_DISPATCH_BUDGET_MS by default.

    Raises:
        NoBackend: no exchange can run on all ranks. NotDecided: locked mode, and no rank has a stored decision.
        RankLost: a rank has exited, or did not answer in time.
    """
    reports = sharded.link.all_gather_objects(_RankReport.of(sharded))
    ranks = Ranks(sharded, reports, measure, settings.budget_ms() if budget_ms is None else budget_ms)
    forced = ranks.forced(exchange)
    return decide_by_mode(ranks, force=force) if forced is None else counted(forced)


def explained(sharded: ShardedProblem, exchange: str | None) -> Decision:
    """The decision as far as this rank knows: its stored one, else the static choice. Not a collective.

    Args:
        exchange: the forced one, or None.

    Raises:
        NoBackend: as far as this rank knows, no exchange can run.
    """
    own = _RankReport.of(sharded)
    local = [sharded.sees_others(rank) for rank in range(sharded.link.size)]
    refusals = ({**own.refusals, LOCAL: own.refusals[LOCAL] or why} for why in local)
    ranks = Ranks(sharded, [replace(own, refusals=each) for each in refusals])
    forced = ranks.forced(exchange)
    stored = Store(cache_folder()).get(*ranks.request.address) if forced is None and mode() != "off" else None
    if stored is not None and is_believed(stored):
        return stored
    return forced or ranks.decision(ranks.first, "heuristic", {})


@dataclass(frozen=True, slots=True)
class _RankReport:
    """A rank's hardware, host and refusals of a new problem."""

    silicon: str
    host: str
    refusals: dict[str, str]

    @classmethod
    def of(cls, sharded: ShardedProblem) -> _RankReport:
        return cls(silicon(sharded.problem.device), sharded.link.host, sharded.refusals())


@dataclass
class Ranks:
    """A problem with the reports of all ranks on it, and the sources of their decision, for `decide_by_mode`: each
    of those is a collective.
    """

    sharded: ShardedProblem
    reports: list[_RankReport]
    measure: Measure | None = None
    budget_ms: float = 0.0

    @cached_property
    def usable(self) -> list[str]:
        """The exchanges that every rank can run; only "local" if no rank needs rows of another."""
        found = [name for name in EXCHANGES if not any(each.refusals[name] for each in self.reports)]
        return [LOCAL] if LOCAL in found else found

    @property
    def first(self) -> str:
        """The static choice: "ring" for dense patterns, which need many rows and so less memory; else "gather"."""
        preferred = RING if isinstance(self.sharded.problem.pattern.natural, Dense) else GATHER
        return preferred if preferred in self.usable else self.usable[0]

    @property
    def fingerprint(self) -> str:
        """Identifies the ranks' hardware, their distribution over hosts, and the layout of the sequence."""
        hosts = list(dict.fromkeys(each.host for each in self.reports))
        layout = self.sharded.layout
        even = layout.lengths == deal(layout.tokens, layout.ranks)
        machines = [(each.silicon, hosts.index(each.host)) for each in self.reports]
        digest = hashlib.sha256(json.dumps([machines, layout.kind, even]).encode()).hexdigest()[:12]
        return f"ring-{layout.ranks}r-{len(hosts)}h-{layout.kind}-{digest}"

    @cached_property
    def request(self) -> Request:
        return Request(self.sharded.problem, self.fingerprint)

    def forced(self, exchange: str | None) -> Decision | None:
        """The decision where there is nothing to choose from: an exchange is given, or none is needed.

        Raises:
            NoBackend: the given exchange cannot run, or none can.
        """
        if exchange is not None and exchange in self.usable:
            return self.decision(exchange, "forced", {})
        if exchange is None and self.usable:
            return self.decision(LOCAL, "heuristic", {}) if self.usable == [LOCAL] else None
        problem, what = self.sharded.problem, f"{exchange!r} cannot run it:"
        if exchange is None:
            what = f"no exchange can run {problem}{problem.as_given}:"
        why = {name: self._reason(name) for name in (EXCHANGES if exchange is None else (exchange,))}
        raise NoBackend("\n  ".join([what, *(f"{name}: {reason}" for name, reason in why.items() if reason)]))

    def _reason(self, name: str) -> str:
        """Why an exchange cannot run on all ranks: the first reasons, the number of the others; "" if it can."""
        why = sorted({each.refusals[name] for each in self.reports} - {""})
        if not why:
            return "" if name in self.usable else NOTHING_TO_EXCHANGE
        more = len(why) - MAX_REASONS
        return "; ".join([*why[:MAX_REASONS], *([f"and {more} more"] if more > 0 else [])])

    # --- sources ------------------------------------------------------------------------------------------------------

    def stored(self) -> Decision | None:
        """The latest decision that any rank has stored and all can run, measured here if possible.

        An imported one is not confirmed by a few calls, as on one device: in `tune` mode the ranks measure anew.
        """
        own = Store(cache_folder()).get(*self.request.address)
        own = own if own is not None and is_believed(own) else None
        stored = self.sharded.link.all_gather_objects(None if own is None or own.source != "measured" else encode(own))
        valid = [each for each in map(_decoded, filter(None, stored)) if self._is_valid(each)]
        if not valid:
            return None
        latest = max(valid, key=lambda each: (not each.origin, time_of(each.created)))
        if own != latest:
            Store(cache_folder()).put(latest)
        return counted(latest, loaded=True)

    def _is_valid(self, decision: Decision) -> bool:
        """Whether a stored decision can still run, and was measured with this version of torch."""
        versions = [row.version for row in decision.candidates if row.id == decision.chosen]
        return decision.choice == NAME and decision.order in self.usable and versions == [torch.__version__]

    def locked_miss(self) -> Decision:
        why = f"no decision is stored on {self.request.silicon}"
        raise NotDecided(f"ATTN_DISPATCH_MODE=locked and {why} for {self.sharded.problem} by any rank")

    def measured(self) -> Decision | None:
        """The decision of a trial, identical on every rank; None if every candidate failed."""
        assert self.measure is not None
        rows, chosen, took_ms = self.measure(self.usable, self.first, self.budget_ms)
        if chosen is None:
            return None
        made = self.decision(chosen, "measured", rows, elapsed_ms=took_ms, budget_ms=self.budget_ms)
        decision = _decoded(self.sharded.link.all_gather_objects(encode(made))[0])
        Store(cache_folder()).put(decision)
        return counted(decision)

    def deferred(self) -> None:
        """None: nothing is measured between calls, which all ranks would have to interrupt together."""

    def predicted(self) -> None:
        """None: decisions over ranks are not predicted from other sizes."""

    def static(self) -> Decision:
        return counted(self.decision(self.first, "heuristic", {}))

    def decision(self, chosen: str, source: str, rows: Mapping[str, Row], **more: Any) -> Decision:
        every = (rows.get(name) or self._row(name, chosen, source) for name in EXCHANGES)
        of_ranks = {
            "ranks": str(len(self.reports)),
            "hosts": str(len({each.host for each in self.reports})),
            "shards": ", ".join(map(str, sorted(set(self.sharded.layout.lengths)))),
        }
        where = {**provenance(self.sharded.problem.device), **of_ranks}
        return self.request.decision((NAME, chosen), source, every, provenance=where, **more)

    def _row(self, name: str, chosen: str, source: str) -> Row:
        status, why = "chosen" if name == chosen else "not_measured", self._reason(name)
        status, why = ("unsupported", why) if why else (status, source)
        return Row(backend=NAME, order=name, status=status, reason=why, version=str(torch.__version__))


def _decoded(data: bytes) -> Decision:
    try:
        return decode(data)
    except Damaged as error:
        text = f"another rank's decision cannot be read here ({error}): are the versions the same?"
        raise GroupMismatch(text) from error
