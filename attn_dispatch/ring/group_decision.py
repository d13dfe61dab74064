"""One decision for all ranks of a mesh: stored, static or measured, before any row is exchanged.

The time of a candidate is that of the slowest rank. A candidate that one rank cannot run, or that fails on one rank in
a trial, is ruled out on all. Every rank stores the same decision, under a fingerprint of all ranks' machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from attn_dispatch import settings
from attn_dispatch.decisions.decide import counted
from attn_dispatch.decisions.look_up import is_believed
from attn_dispatch.decisions.modes import decide_by_mode
from attn_dispatch.errors import GroupMismatch, NoBackend, NotDecided
from attn_dispatch.machine.hardware import provenance, silicon
from attn_dispatch.ring.rows.layout import deal
from attn_dispatch.ring.sharded_problem import ShardedProblem
from attn_dispatch.ring.trial import NAME, Tensors, Trial, version
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.orders import EXCHANGES, GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Damaged, Decision, Row, decode, encode, time_of
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request

NOTHING_TO_EXCHANGE = "no rank sees another's rows: there is nothing to exchange"
MAX_REASONS = 2  #: in an error: those of ranks often differ only in numbers


def decide_together(
    sharded: ShardedProblem,
    tensors: Tensors,
    masks: Mapping[str, Tensor],
    exchange: str | None,
    *,
    force: bool = False,
    budget_ms: float | None = None,
) -> Decision:
    """The common decision of all ranks; a collective.

    Args:
        tensors: q, k and v of this rank, for trials; not written to.
        exchange: the forced one, which is then not measured; or None.
        force: measure in every mode, even if a decision is stored.
        budget_ms: for the trial; $ATTN_DISPATCH_BUDGET_MS by default.

    Raises:
        NoBackend: no exchange can run on all ranks. NotDecided: locked mode, and no rank has a stored decision.
        RankLost: a rank has exited, or did not answer in time.
    """
    ranks = Ranks.of(sharded)
    if exchange is not None:
        if exchange not in ranks.usable:
            raise NoBackend(ranks.refusal_text(exchange))
        return counted(ranks.decision(exchange, "forced", {}))
    if not ranks.usable:
        raise NoBackend(ranks.refusal_text(None))
    if LOCAL in ranks.usable:
        return counted(ranks.decision(LOCAL, "heuristic", {}))  # nothing to exchange, and nothing to choose from
    return decide_by_mode(_GroupDecision(ranks, tensors, masks, budget_ms), force=force)


@dataclass(frozen=True, eq=False)
class _GroupDecision:
    """The sources of a common decision, for `decide_by_mode`; each method is a collective."""

    ranks: Ranks
    tensors: Tensors
    masks: Mapping[str, Tensor]
    budget_ms: float | None

    def stored(self) -> Decision | None:
        found = self.ranks.stored()
        return found and counted(found, loaded=True)

    def locked_miss(self) -> Decision:
        why = f"no decision is stored on {self.ranks.request.silicon}"
        raise NotDecided(f"ATTN_DISPATCH_MODE=locked and {why} for {self.ranks.sharded.problem} by any rank")

    def measured(self) -> Decision | None:
        """The decision of a trial, identical on every rank; None if every candidate failed."""
        ranks, budget_ms = self.ranks, settings.budget_ms() if self.budget_ms is None else self.budget_ms
        rows, chosen, took_ms = Trial(
            ranks.sharded, ranks.usable, ranks.first, self.tensors, self.masks, budget_ms
        ).rows()
        if chosen is None:
            return None
        made = ranks.decision(chosen, "measured", rows, elapsed_ms=took_ms, budget_ms=budget_ms)
        decision = _decoded(ranks.sharded.link.all_gather_objects(encode(made))[0])
        _store(decision)
        return counted(decision)

    def deferred(self) -> None:
        """None: nothing is measured between calls, which all ranks would have to interrupt together."""

    def predicted(self) -> None:
        """None: decisions over ranks are not predicted from other sizes."""

    def static(self) -> Decision:
        return counted(self.ranks.decision(self.ranks.first, "heuristic", {}))


def explained(sharded: ShardedProblem, exchange: str | None) -> Decision:
    """The decision as far as this rank knows: its stored one, else the static choice. Not a collective.

    Args:
        exchange: the forced one, or None.

    Raises:
        NoBackend: as far as this rank knows, no exchange can run.
    """
    own = _RankReport.of(sharded)
    local = [sharded.sees_others(rank) for rank in range(sharded.link.size)]
    ranks = Ranks(
        sharded, [replace(own, refusals={**own.refusals, LOCAL: own.refusals[LOCAL] or why}) for why in local]
    )
    if exchange is not None and exchange in ranks.usable:
        return ranks.decision(exchange, "forced", {})
    if exchange is not None or not ranks.usable:
        raise NoBackend(ranks.refusal_text(exchange))
    stored = Store(cache_folder()).get(*ranks.request.address)
    if stored is not None and mode() != "off" and is_believed(stored):
        return stored
    return ranks.decision(LOCAL if LOCAL in ranks.usable else ranks.first, "heuristic", {})


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
    """A problem with the reports of all ranks on it."""

    sharded: ShardedProblem
    reports: list[_RankReport]

    @classmethod
    def of(cls, sharded: ShardedProblem) -> Ranks:
        return cls(sharded, sharded.link.all_gather_objects(_RankReport.of(sharded)))

    @property
    def usable(self) -> list[str]:
        """The exchanges that every rank can run; only "local" if no rank needs rows of another."""
        found = [name for name in EXCHANGES if not any(each.refusals[name] for each in self.reports)]
        return [LOCAL] if LOCAL in found else found

    @property
    def first(self) -> str:
        """The static choice: "ring" for dense patterns, which need many rows and so less memory; else "gather"."""
        usable = [each for each in self.usable if each != ULYSSES] or self.usable
        preferred = RING if isinstance(self.sharded.problem.pattern.natural, Dense) else GATHER
        return preferred if preferred in usable else usable[0]

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

    def refusal_text(self, exchange: str | None) -> str:
        """The reasons why no exchange, or the given one, can run."""
        problem = self.sharded.problem
        what = f"no exchange can run {problem}{problem.as_given}:"
        lines = [what if exchange is None else f"{exchange!r} cannot run it:"]
        for name in EXCHANGES if exchange is None else (exchange,):
            why = self._reasons(name)
            lines += [f"{name}: {_few(why)}"] if why else []
        return "\n  ".join(lines)

    def _reasons(self, name: str) -> list[str]:
        """The reasons why an exchange cannot run on all ranks; empty if it can."""
        why = sorted({each.refusals[name] for each in self.reports} - {""})
        if not why and name not in self.usable:
            why = [NOTHING_TO_EXCHANGE]
        return why

    def stored(self) -> Decision | None:
        """The latest decision that any rank has stored and all can run, measured here if possible; a collective.

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
            _store(latest)
        return latest

    def _is_valid(self, decision: Decision) -> bool:
        """Whether a stored decision can still run, and was measured with this version of torch."""
        chosen = next((row for row in decision.candidates if row.id == decision.chosen), None)
        return (
            decision.choice == NAME
            and decision.order in self.usable
            and chosen is not None
            and (chosen.version == version())
        )

    def decision(self, chosen: str, source: str, rows: Mapping[str, Row], **more: Any) -> Decision:
        every = (rows.get(name) or self._row(name, chosen, source) for name in EXCHANGES)
        return self.request.decision((NAME, chosen), source, every, provenance=self._provenance(), **more)

    def _row(self, name: str, chosen: str, source: str) -> Row:
        why = self._reasons(name)
        if why:
            return Row(backend=NAME, order=name, status="unsupported", reason=_few(why), version=version())
        status = "chosen" if name == chosen else "not_measured"
        return Row(backend=NAME, order=name, status=status, reason=source, version=version())

    def _provenance(self) -> dict[str, str]:
        hosts = len({each.host for each in self.reports})
        lengths = sorted(set(self.sharded.layout.lengths))
        of_ranks = {"ranks": str(len(self.reports)), "hosts": str(hosts), "shards": ", ".join(map(str, lengths))}
        return {**provenance(self.sharded.problem.device), **of_ranks}


def _few(reasons: list[str]) -> str:
    """The first reasons, with the number of the others."""
    more = len(reasons) - MAX_REASONS
    return "; ".join(reasons[:MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _store(decision: Decision) -> None:
    Store(cache_folder()).put(decision)


def _decoded(data: bytes) -> Decision:
    try:
        return decode(data)
    except Damaged as error:
        text = f"another rank's decision cannot be read here ({error}): are the versions the same?"
        raise GroupMismatch(text) from error
