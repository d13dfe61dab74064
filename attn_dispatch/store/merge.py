"""Two decisions about one problem as one: commutative, associative and idempotent, so that no order of copying matters.

Each row is the later measurement of its candidate; the header, with the choice, that of the later decision; equal times
go by canonical bytes. What follows from the rows and the choice (who is slower, who ties) is worked out anew as soon as
rows of more than one decision meet: it takes part in no comparison, so it cannot make the order of merging matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from attn_dispatch.store.decision import NEVER, Decision, Drift, Row, canonical, time_of, to_plain

RACED = ("chosen", "slower", "tie")
OPEN = (*RACED, "not_measured")  #: what a row without times may become when another choice is made
Name = tuple[str, str]  #: of a candidate: backend and order
Rows = dict[Name, Row]
Key = tuple[datetime, bytes]


def merge(a: Decision, b: Decision) -> Decision:
    """What both know together.

    Raises:
        ValueError: they are about different problems.
    """
    if a.address != b.address:
        raise ValueError(f"decisions of different problems: {a.silicon} {a.key} and {b.silicon} {b.key}")
    rows = _join(_rows(a), _rows(b))
    sides = _latest(a, b)
    extra = _union(a.extra, b.extra)
    drift = max(a, b, key=_drift_key).drift
    if all(_facts(rows) == _facts(_rows(side)) for side in sides) and len({_verdicts(side) for side in sides}) == 1:
        # Nothing came in from elsewhere: what the decision itself said of its rows holds.
        settled = tuple(replace(row, extra=rows[_name(row)].extra) for row in sides[0].candidates)
        return replace(sides[0], candidates=settled, extra=extra, drift=drift)
    return _settled(replace(sides[0], extra=extra, drift=drift), rows)


def _latest(a: Decision, b: Decision) -> list[Decision]:
    """Those with the later header: one, or both where there is no difference."""
    keys = [_header_key(a), _header_key(b)]
    return [side for side, key in zip((a, b), keys) if key == max(keys)]


def _header_key(decision: Decision) -> Key:
    plain = to_plain(replace(decision, candidates=(), drift=None, preferred=_preferred(decision), extra={}))
    del plain["choice"], plain["order"], plain["candidates"]
    return time_of(decision.created), canonical(plain)


def _drift_key(decision: Decision) -> tuple[datetime, bool, datetime, bytes]:
    drift: Drift | None = decision.drift
    seen = NEVER if drift is None else time_of(drift.seen)
    return time_of(decision.created), drift is not None, seen, canonical(drift)


def _preferred(decision: Decision) -> Name:
    return decision.preferred or (decision.choice, decision.order)


def _name(row: Row) -> Name:
    return row.backend, row.order


def _rows(decision: Decision) -> Rows:
    return {_name(row): row for row in decision.candidates}


def _join(a: Rows, b: Rows) -> Rows:
    """The later row of each candidate, by name."""
    return {name: _later(a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys())}


def _later(a: Row | None, b: Row | None) -> Row:
    if a is None or b is None:
        found = a if b is None else b
        assert found is not None
        return found
    return replace(max(a, b, key=_row_key), extra=_union(a.extra, b.extra))


def _row_key(row: Row) -> Key:
    return time_of(row.measured), canonical(_fact(row))


def _fact(row: Row) -> Row:
    """What was seen of a candidate by itself, without what follows from the others."""
    bare = replace(row, extra={}, ratio=None, ratio_low=None, ratio_high=None, break_even=None)
    if row.median_ms is None and row.status in OPEN:
        return replace(bare, status="not_measured")
    return replace(bare, status="tie", reason="") if row.status in RACED else bare


def _facts(rows: Rows) -> list[Row]:
    return [_fact(row) for _, row in sorted(rows.items())]


def _verdicts(decision: Decision) -> bytes:
    """Everything about the rows that is no fact of one alone, their order included."""
    rows = [replace(row, extra={}) for row in decision.candidates]
    return canonical([decision.choice, decision.order, decision.preferred, rows])


def _settled(header: Decision, rows: Rows) -> Decision:
    """The choice of the header, if its row still allows it, and what follows for the others."""
    wanted = _preferred(header)
    choice = _choice(wanted, rows)
    chosen = rows.get(choice)
    found = sorted((_verdict(row, chosen) for row in rows.values()), key=_rank)
    preferred = None if choice == wanted else wanted
    return replace(header, candidates=tuple(found), choice=choice[0], order=choice[1], preferred=preferred)


def _rank(row: Row) -> tuple[bool, float, Name]:
    return (
        row.status != "chosen",
        row.median_ms if _is_timed(row) and row.median_ms is not None else math.inf,
        _name(row),
    )


def _choice(wanted: Name, rows: Rows) -> Name:
    timed = [(row.median_ms, name) for name, row in rows.items() if _is_timed(row) and row.median_ms is not None]
    if any(name == wanted for _, name in timed):
        return wanted
    if timed:
        return min(timed)[1]
    row = rows.get(wanted)
    return wanted if row is not None and row.status in OPEN else ("", "")


def _is_timed(row: Row) -> bool:
    return row.median_ms is not None and row.status in RACED


def _verdict(row: Row, chosen: Row | None) -> Row:
    fact = replace(_fact(row), extra=row.extra)
    if chosen is not None and _name(row) == _name(chosen):
        return replace(fact, status="chosen")
    if chosen is None or not _is_timed(row) or row.low_ms is None or chosen.high_ms is None:
        return fact
    return replace(fact, status="slower" if row.low_ms > chosen.high_ms else "tie")


def _union(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Both's unknown fields. This version cannot know which value is the later one: the greater bytes hold."""
    return {name: max(_values(name, (a, b)), key=canonical) for name in sorted(a.keys() | b.keys())}


def _values(name: str, sides: Iterable[dict[str, Any]]) -> list[Any]:
    return [side[name] for side in sides if name in side]
