"""Merges two decisions for one problem: commutative, associative and idempotent, so the order of copying is irrelevant.

Each row is the later measurement of its candidate; the header, with the choice, is that of the later decision; equal
times go by canonical bytes. What was measured here precedes what another machine measured, whatever the times.
Fields derived from rows and choice (slower, tie) are recomputed whenever rows come from more than one decision, and
take part in no comparison, so that they cannot make the order of merging matter.
"""

from __future__ import annotations

import math
from datetime import datetime

from msgspec.structs import replace

from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row, canonical, time_of, to_plain

UNTIMED = (*TIMED, "not_measured")  #: statuses between which a row without times may change with the choice
Rows = dict[CandidateId, Row]
SortKey = tuple[bool, datetime, bytes]


def merge(a: Decision, b: Decision) -> Decision:
    """Merge two decisions of one address."""
    rows = _join(_rows(a), _rows(b))
    latest = max(map(_header_key, (a, b)))
    sides = [side for side in (a, b) if _header_key(side) == latest]
    header = sides[0]
    same_facts = all(_facts(rows) == _facts(_rows(side)) for side in sides)
    if same_facts and len(set(map(_relative_bytes, sides))) == 1:
        return header  # all rows come from this decision, so their derived fields are valid
    return _reconciled(header, rows)


def _header_key(decision: Decision) -> SortKey:
    plain = to_plain(replace(decision, candidates=(), preferred=_preferred(decision)))
    del plain["choice"], plain["order"], plain["candidates"]
    return not decision.origin, time_of(decision.created), canonical(plain)


def _preferred(decision: Decision) -> CandidateId:
    return decision.preferred or decision.chosen


def _rows(decision: Decision) -> Rows:
    return {row.id: row for row in decision.candidates}


def _join(a: Rows, b: Rows) -> Rows:
    """The later row of each candidate, sorted by name."""
    return {name: max((side[name] for side in (a, b) if name in side), key=_row_key) for name in sorted(a | b)}


def _row_key(row: Row) -> SortKey:
    return not row.origin, time_of(row.measured), canonical(_fact(row))


def _fact(row: Row) -> Row:
    """The row without fields derived from other rows."""
    bare = replace(row, ratio=None, ratio_low=None, ratio_high=None, open=False)
    if row.median_ms is None and row.status in UNTIMED:
        return replace(bare, status="not_measured")
    return replace(bare, status="tie", reason="") if row.status in TIMED else bare


def _facts(rows: Rows) -> list[Row]:
    return [_fact(row) for _, row in sorted(rows.items())]


def _relative_bytes(decision: Decision) -> bytes:
    """Canonical bytes of the choice and the full rows, derived fields and order of rows included."""
    return canonical([decision.chosen, decision.preferred, decision.candidates])


def _reconciled(header: Decision, rows: Rows) -> Decision:
    """The header's choice, if its row still allows it, with the derived fields of all rows recomputed."""
    wanted = _preferred(header)
    choice = _choice(wanted, rows)
    chosen = rows.get(choice)
    found = sorted((_with_status(row, chosen) for row in rows.values()), key=_rank)
    preferred = None if choice == wanted else wanted
    return replace(header, candidates=tuple(found), choice=choice[0], order=choice[1], preferred=preferred)


def _rank(row: Row) -> tuple[bool, float, CandidateId]:
    return row.status != "chosen", _time_ms(row), row.id


def _choice(wanted: CandidateId, rows: Rows) -> CandidateId:
    times = {name: _time_ms(row) for name, row in rows.items() if _time_ms(row) < math.inf}
    if wanted in times:
        return wanted
    if times:
        return min((ms, name) for name, ms in times.items())[1]
    row = rows.get(wanted)
    return wanted if row is not None and row.status in UNTIMED else ("", "")


def _time_ms(row: Row) -> float:
    """The median of a row that was timed against the others; infinity for the rest."""
    return row.median_ms if row.median_ms is not None and row.status in TIMED else math.inf


def _with_status(row: Row, chosen: Row | None) -> Row:
    fact = _fact(row)
    if chosen is not None and row.id == chosen.id:
        return replace(fact, status="chosen")
    if chosen is None or _time_ms(row) == math.inf or row.low_ms is None or chosen.high_ms is None:
        return fact
    return replace(fact, status="slower" if row.low_ms > chosen.high_ms else "tie")
