"""One decision for all ranks of a mesh: looked up, agreed on or measured together, before any row is exchanged.

What counts is the slowest rank's time. A rank that cannot run a candidate, raises or lacks memory in a trial rules the
candidate out for everybody. Every rank keeps the same decision, under a fingerprint of all ranks' machines.
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
from attn_dispatch.decisions.modes import decide_by_mode
from attn_dispatch.errors import GroupMismatch, NoBackend, NotDecided
from attn_dispatch.machine.hardware import provenance, silicon
from attn_dispatch.ring.rows.layout import deal
from attn_dispatch.ring.sharded_problem import Shared
from attn_dispatch.ring.trial import NAME, Tensors, Trial, version
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.orders import EXCHANGES, GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Damaged, Decision, Row, decode, encode, time_of
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request

NOTHING = "no rank sees another's rows: there is nothing to exchange"
MOST_REASONS = 2  #: of ranks that say the same in other numbers


def decide(
    shared: Shared,
    tensors: Tensors,
    masks: Mapping[str, Tensor],
    exchange: str | None,
    *,
    force: bool = False,
    budget_ms: float | None = None,
) -> Decision:
    """The decision that all ranks go by; a collective.

    Args:
        tensors: q, k and v of this rank, for trials; nothing is written to them.
        exchange: the caller's own choice; nothing is measured then.
        force: measure, whatever is stored and whatever the mode.
        budget_ms: for the trial; $ATTN_DISPATCH_BUDGET_MS by default.

    Raises:
        NoBackend: there is none for all ranks. NotDecided: locked mode, and nobody has one stored.
        RankLost: a rank is gone, or did not take part in time.
    """
    ranks = Ranks.of(shared)
    if exchange is not None:
        if exchange not in ranks.able:
            raise NoBackend(ranks.told(exchange))
        return ranks.decision(exchange, "forced", {})
    if not ranks.able:
        raise NoBackend(ranks.told(None))
    if LOCAL in ranks.able:
        return ranks.decision(LOCAL, "heuristic", {})  # nothing is exchanged, and there is nothing to choose from
    return decide_by_mode(_Steps(ranks, tensors, masks, budget_ms), force=force)


@dataclass(frozen=True, eq=False)
class _Steps:
    """The ways to a decision of all ranks; each is a collective."""

    ranks: Ranks
    tensors: Tensors
    masks: Mapping[str, Tensor]
    budget_ms: float | None

    def stored(self) -> Decision | None:
        return self.ranks.kept()

    def locked_miss(self) -> Decision:
        raise NotDecided(f"ATTN_DISPATCH_MODE=locked and no rank has a decision for {self.ranks.shared.problem}")

    def measured(self) -> Decision | None:
        """Measured together, or None where every candidate failed; the same on every rank, to the letter."""
        ranks, budget_ms = self.ranks, settings.budget_ms() if self.budget_ms is None else self.budget_ms
        rows, chosen, took_ms = Trial(ranks.shared, ranks.able, ranks.first, self.tensors, self.masks, budget_ms).rows()
        if chosen is None:
            return None
        made = ranks.decision(chosen, "measured", rows, elapsed_ms=took_ms, budget_ms=budget_ms)
        decision = _decoded(ranks.shared.link.objects(encode(made))[0])
        _keep(decision)
        return decision

    def predicted(self) -> None:
        """Nothing is learned of other sizes."""

    def static(self) -> Decision:
        return self.ranks.decision(self.ranks.first, "heuristic", {})


def explained(shared: Shared, exchange: str | None) -> Decision:
    """What is known without asking the others: what this rank has stored, else the static choice. No collective.

    Args:
        exchange: the caller's own choice.

    Raises:
        NoBackend: as far as this rank knows there is none.
    """
    mine = _Said.of(shared)
    local = [shared.sees_others(rank) for rank in range(shared.link.size)]
    said = [replace(mine, refusals={**mine.refusals, LOCAL: mine.refusals[LOCAL] or why}) for why in local]
    ranks = Ranks(shared, said)
    if exchange is not None and exchange in ranks.able:
        return ranks.decision(exchange, "forced", {})
    if exchange is not None or not ranks.able:
        raise NoBackend(ranks.told(exchange))
    kept = Store(cache_folder()).get(*ranks.request.address)
    if kept is not None and mode() != "off":
        return kept
    return ranks.decision(LOCAL if LOCAL in ranks.able else ranks.first, "heuristic", {})


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says of itself before a new problem."""

    silicon: str
    host: str
    refusals: dict[str, str]

    @classmethod
    def of(cls, shared: Shared) -> _Said:
        return cls(silicon(shared.problem.device), shared.link.host, shared.refusals())


@dataclass
class Ranks:
    """A problem with what all ranks have said of it."""

    shared: Shared
    said: list[_Said]

    @classmethod
    def of(cls, shared: Shared) -> Ranks:
        return cls(shared, shared.link.objects(_Said.of(shared)))

    @property
    def able(self) -> list[str]:
        """The exchanges that every rank can do."""
        found = [name for name in EXCHANGES if not any(each.refusals[name] for each in self.said)]
        return [LOCAL] if LOCAL in found else found

    @property
    def first(self) -> str:
        """The static choice: few rows at once, many one peer after the other, which needs less memory."""
        several = [each for each in self.able if each != ULYSSES] or self.able
        wanted = RING if isinstance(self.shared.problem.pattern.natural, Dense) else GATHER
        return wanted if wanted in several else several[0]

    @property
    def fingerprint(self) -> str:
        """Of all ranks' machines, where they are, and how the sequence is dealt out."""
        hosts = list(dict.fromkeys(each.host for each in self.said))
        layout = self.shared.layout
        even = layout.lengths == deal(layout.tokens, layout.ranks)
        what = [(each.silicon, hosts.index(each.host)) for each in self.said]
        digest = hashlib.sha256(json.dumps([what, layout.kind, even]).encode()).hexdigest()[:12]
        return f"ring-{layout.ranks}r-{len(hosts)}h-{layout.kind}-{digest}"

    @cached_property
    def request(self) -> Request:
        return Request(self.shared.problem, self.fingerprint)

    def told(self, exchange: str | None) -> str:
        """Why nothing can be done."""
        lines = [f"no exchange can run {self.shared.problem}:" if exchange is None else f"{exchange!r} cannot run it:"]
        for name in EXCHANGES if exchange is None else (exchange,):
            why = self._why_not(name)
            lines += [f"{name}: {_few(why)}"] if why else []
        return "\n  ".join(lines)

    def _why_not(self, name: str) -> list[str]:
        """Every reason why an exchange is none for all ranks; empty where it is one."""
        why = sorted({each.refusals[name] for each in self.said} - {""})
        if not why and name not in self.able:
            why = [NOTHING]
        return why

    def kept(self) -> Decision | None:
        """The latest that any rank has stored, if all can do it; a collective."""
        mine = Store(cache_folder()).get(*self.request.address)
        said = self.shared.link.objects(None if mine is None or mine.source != "measured" else encode(mine))
        held = [each for each in map(_decoded, filter(None, said)) if self._holds(each)]
        if not held:
            return None
        latest = max(held, key=lambda each: time_of(each.created))  # a store that has an older one takes it too
        if mine != latest:
            _keep(latest)
        return latest

    def _holds(self, decision: Decision) -> bool:
        """Whether it can still be gone by: another version is measured anew."""
        chosen = next((row for row in decision.candidates if row.id == decision.chosen), None)
        return (
            decision.choice == NAME
            and decision.order in self.able
            and chosen is not None
            and (chosen.version == version())
        )

    def decision(self, chosen: str, source: str, rows: Mapping[str, Row], **more: Any) -> Decision:
        every = (rows.get(name) or self._row(name, chosen, source) for name in EXCHANGES)
        return self.request.decision((NAME, chosen), source, every, provenance=self._provenance(), **more)

    def _row(self, name: str, chosen: str, source: str) -> Row:
        why = self._why_not(name)
        if why:
            return Row(backend=NAME, order=name, status="unsupported", reason=_few(why), version=version())
        status = "chosen" if name == chosen else "not_measured"
        return Row(backend=NAME, order=name, status=status, reason=source, version=version())

    def _provenance(self) -> dict[str, str]:
        hosts = len({each.host for each in self.said})
        lengths = sorted(set(self.shared.layout.lengths))
        of_ranks = {"ranks": str(len(self.said)), "hosts": str(hosts), "shards": ", ".join(map(str, lengths))}
        return {**provenance(self.shared.problem.device), **of_ranks}


def _few(reasons: list[str]) -> str:
    """The first ones, where every rank has one of its own."""
    more = len(reasons) - MOST_REASONS
    return "; ".join(reasons[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _keep(decision: Decision) -> None:
    Store(cache_folder()).put(decision)


def _decoded(data: bytes) -> Decision:
    try:
        return decode(data)
    except Damaged as error:
        text = f"another rank's decision cannot be read here ({error}): are the versions the same?"
        raise GroupMismatch(text) from error
