"""Merges two decisions for one problem: commutative, associative and idempotent, so the order of copying is irrelevant.

Each row is the later measurement of its candidate; the header, with the choice, is that of the later decision; equal
times go by canonical bytes. What was measured here precedes what another machine measured, whatever the times.
Fields derived from rows and choice (slower, tie) are recomputed whenever rows come from more than one decision, and
take part in no comparison, so that they cannot make the order of merging matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from attn_dispatch.store.decision import NEVER, TIMED, CandidateId, Decision, Drift, Row, canonical, time_of, to_plain

UNTIMED = (*TIMED, "not_measured")  #: statuses between which a row without times may change with the choice
Rows = dict[CandidateId, Row]
SortKey = tuple[bool, datetime, bytes]


def merge(a: Decision, b: Decision) -> Decision:
    """Merge two decisions for the same problem.

    Raises:
        ValueError: their addresses differ.
    """
    if a.address != b.address:
        raise ValueError(f"decisions of different problems: {a.silicon} {a.key} and {b.silicon} {b.key}")
    rows = _join(_rows(a), _rows(b))
    sides = _latest(a, b)
    extra = _union(a.extra, b.extra)
    drift = max(a, b, key=_drift_key).drift
    same_facts = all(_facts(rows) == _facts(_rows(side)) for side in sides)
    if same_facts and len({_relative_bytes(side) for side in sides}) == 1:
        # All rows come from this decision, so their derived fields are valid.
        own_rows = tuple(replace(row, extra=rows[_name(row)].extra) for row in sides[0].candidates)
        return replace(sides[0], candidates=own_rows, extra=extra, drift=drift)
    return _reconciled(replace(sides[0], extra=extra, drift=drift), rows)


def _latest(a: Decision, b: Decision) -> list[Decision]:
    """The decision with the later header; both where the headers are equal."""
    keys = [_header_key(a), _header_key(b)]
    return [side for side, key in zip((a, b), keys) if key == max(keys)]


def _header_key(decision: Decision) -> SortKey:
    plain = to_plain(replace(decision, candidates=(), drift=None, preferred=_preferred(decision), extra={}))
    del plain["choice"], plain["order"], plain["candidates"]
    return not decision.origin, time_of(decision.created), canonical(plain)


def _drift_key(decision: Decision) -> tuple[bool, datetime, bool, datetime, bytes]:
    drift: Drift | None = decision.drift
    seen = NEVER if drift is None else time_of(drift.seen)
    return not decision.origin, time_of(decision.created), drift is not None, seen, canonical(drift)


def _preferred(decision: Decision) -> CandidateId:
    return decision.preferred or (decision.choice, decision.order)


def _name(row: Row) -> CandidateId:
    return row.backend, row.order


def _rows(decision: Decision) -> Rows:
    return {_name(row): row for row in decision.candidates}


def _join(a: Rows, b: Rows) -> Rows:
    """The later row of each candidate, sorted by name."""
    return {name: _later(a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys())}


def _later(a: Row | None, b: Row | None) -> Row:
    if a is None or b is None:
        found = a if b is None else b
        assert found is not None
        return found
    return replace(max(a, b, key=_row_key), extra=_union(a.extra, b.extra))


def _row_key(row: Row) -> SortKey:
    return not row.origin, time_of(row.measured), canonical(_fact(row))


def _fact(row: Row) -> Row:
    """The row without fields derived from other rows."""
    bare = replace(row, extra={}, ratio=None, ratio_low=None, ratio_high=None, break_even=None, open=False)
    if row.median_ms is None and row.status in UNTIMED:
        return replace(bare, status="not_measured")
    return replace(bare, status="tie", reason="") if row.status in TIMED else bare


def _facts(rows: Rows) -> list[Row]:
    return [_fact(row) for _, row in sorted(rows.items())]


def _relative_bytes(decision: Decision) -> bytes:
    """Canonical bytes of the choice and the full rows, derived fields and order of rows included."""
    rows = [replace(row, extra={}) for row in decision.candidates]
    return canonical([decision.choice, decision.order, decision.preferred, rows])


def _reconciled(header: Decision, rows: Rows) -> Decision:
    """The header's choice, if its row still allows it, with the derived fields of all rows recomputed."""
    wanted = _preferred(header)
    choice = _choice(wanted, rows)
    chosen = rows.get(choice)
    found = sorted((_with_status(row, chosen) for row in rows.values()), key=_rank)
    preferred = None if choice == wanted else wanted
    return replace(header, candidates=tuple(found), choice=choice[0], order=choice[1], preferred=preferred)


def _rank(row: Row) -> tuple[bool, float, CandidateId]:
    return (
        row.status != "chosen",
        row.median_ms if _is_timed(row) and row.median_ms is not None else math.inf,
        _name(row),
    )


def _choice(wanted: CandidateId, rows: Rows) -> CandidateId:
    timed = [(row.median_ms, name) for name, row in rows.items() if _is_timed(row) and row.median_ms is not None]
    if any(name == wanted for _, name in timed):
        return wanted
    if timed:
        return min(timed)[1]
    row = rows.get(wanted)
    return wanted if row is not None and row.status in UNTIMED else ("", "")


def _is_timed(row: Row) -> bool:
    return row.median_ms is not None and row.status in TIMED


def _with_status(row: Row, chosen: Row | None) -> Row:
    fact = replace(_fact(row), extra=row.extra)
    if chosen is not None and _name(row) == _name(chosen):
        return replace(fact, status="chosen")
    if chosen is None or not _is_timed(row) or row.low_ms is None or chosen.high_ms is None:
        return fact
    return replace(fact, status="slower" if row.low_ms > chosen.high_ms else "tie")


def _union(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Join the unknown fields of both; of two values the one with the greater canonical bytes, as no time is known."""
    return {name: max(_values(name, (a, b)), key=canonical) for name in sorted(a.keys() | b.keys())}


def _values(name: str, sides: Iterable[dict[str, Any]]) -> list[Any]:
    return [side[name] for side in sides if name in side]
