"""Merging decisions: the order of copying does not matter, no candidate is lost, statuses within a decision stay."""

from __future__ import annotations

from functools import reduce
from itertools import permutations
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from attn_dispatch.store.decision import Decision, Row, canonical, decode, encode, from_elsewhere, to_plain
from attn_dispatch.store.merge import merge
from tests.support.entries import decision

TIMES = tuple(f"2025-01-0{day}T00:00:00.000000+00:00" for day in (1, 2, 3))
ABSENT = ("failed", "unsupported", "not_measured", "incorrect", "quarantined")


def random_row(random: Random, backend: str) -> Row:
    timed = random.random() < 0.6
    low, median, high = sorted(random.choices([1.0, 1.5, 2.0], k=3))
    return Row(
        backend=backend,
        order="natural",
        status=random.choice(["slower", "tie"] if timed else ABSENT),
        reason=random.choice(["", "why"]),
        median_ms=median if timed else None,
        low_ms=low if timed else None,
        high_ms=high if timed else None,
        ratio=random.choice([None, 2.0]),
        measured=random.choice([None, *TIMES]),
        origin=random.choice(["", "", "imported"]),
    )


def random_decision(random: Random) -> Decision:
    """As a tuner or another version could have written it; often at the same time as another."""
    names = random.sample("abcd", random.randint(1, 4))
    found = [random_row(random, name) for name in names]
    found[0] = replace(found[0], status="chosen")
    random.shuffle(found)
    return decision(
        choice=names[0],
        candidates=tuple(found),
        created=random.choice(TIMES),
        title=random.choice(["one", "two"]),
        preferred=random.choice([None, None, ("b", "natural")]),
        origin=random.choice(["", "", "imported"]),
    )


def related(seed: int) -> list[Decision]:
    """Four decisions, of which some are merged, marked or judged anew from others."""
    random = Random(seed)
    a, b, c, d = (random_decision(random) for _ in range(4))
    if random.random() < 0.3:
        b = merge(a, b)
    if random.random() < 0.2:
        c = replace(a, title=c.title)
    if random.random() < 0.2:
        other = {"slower": "tie", "tie": "slower"}
        d = replace(c, candidates=tuple(replace(r, status=other.get(r.status, r.status)) for r in c.candidates))
    return [a, b, c, d]


four = st.integers(0, 2**64).map(related)  #: from a seed: drawn value by value they take a hundred times as long


def plain(one: Decision) -> bytes:
    return canonical(to_plain(one))


@given(four)
def test_the_order_of_merging_does_not_matter(given: list[Decision]) -> None:
    a, b, c, d = given
    assert plain(merge(a, a)) == plain(a)
    assert plain(merge(a, b)) == plain(merge(b, a))
    assert plain(merge(merge(a, b), c)) == plain(merge(a, merge(b, c)))
    assert plain(merge(merge(a, b), merge(c, d))) == plain(merge(merge(d, b), merge(a, c)))
    assert plain(merge(merge(a, b), a)) == plain(merge(a, b))


@given(four)
def test_every_order_through_files(given: list[Decision]) -> None:
    """Written, read and merged step by step: what a file does not hold cannot be needed later."""

    def step(x: Decision, y: Decision) -> Decision:
        return merge(msgspec.convert(to_plain(x), Decision), y)

    assert len({plain(reduce(step, order)) for order in permutations(given)}) == 1


@given(four)
def test_a_merge_has_all_rows_and_one_choice(given: list[Decision]) -> None:
    a, b, *_ = given
    found = merge(a, b)
    names = {(row.backend, row.order) for one in (a, b) for row in one.candidates}
    assert {(row.backend, row.order) for row in found.candidates} == names
    assert len(found.candidates) == len(names)
    assert found.created == max((not each.origin, each.created) for each in (a, b))[1]
    assert found.origin == min(a.origin, b.origin)
    chosen = [(row.backend, row.order) for row in found.candidates if row.status == "chosen"]
    assert chosen == ([(found.choice, found.order)] if found.choice else [])
    if found.choice:
        assert decode(encode(found)) == found
    else:
        assert not [row for row in found.candidates if row.status in {"slower", "tie"}]


def row(backend: str, status: str, day: int, median: float | None = None, **more: Any) -> Row:
    times = {} if median is None else {"median_ms": median, "low_ms": median * 0.9, "high_ms": median * 1.1}
    return Row(backend=backend, order="natural", status=status, measured=TIMES[day - 1], **{**times, **more})


def of(day: int, *candidates: Row, **more: Any) -> Decision:
    choice = next(each.backend for each in candidates if each.status == "chosen")
    return decision(choice=choice, candidates=candidates, created=TIMES[day - 1], **more)


def statuses(one: Decision) -> dict[str, str]:
    return {each.backend: each.status for each in one.candidates}


def test_rows_absent_from_the_later_decision_stay() -> None:
    old = of(1, row("a", "chosen", 1, 1.0), row("plugin", "slower", 1, 5.0), row("gone", "failed", 1, reason="broke"))
    new = of(2, row("a", "slower", 2, 3.0), row("b", "chosen", 2, 2.0), title="new")
    found = merge(old, new)
    assert (found.choice, found.title, found.created) == ("b", "new", TIMES[1])
    assert statuses(found) == {"b": "chosen", "a": "slower", "plugin": "slower", "gone": "failed"}
    assert next(each.reason for each in found.candidates if each.backend == "gone") == "broke"
    assert next(each.median_ms for each in found.candidates if each.backend == "a") == 3.0


def test_statuses_within_one_decision_stay() -> None:
    """Paired samples resolve more than two intervals do."""
    fresh = of(2, row("b", "slower", 2, 1.01, ratio=1.01, reason="by a little"), row("a", "chosen", 2, 1.0))
    old = of(1, row("a", "tie", 1, 1.0), row("b", "chosen", 1, 1.0))
    assert merge(old, fresh) == fresh
    assert merge(fresh, fresh) == fresh
    more = merge(fresh, of(1, row("c", "chosen", 1, 9.0)))
    assert statuses(more) == {"a": "chosen", "b": "tie", "c": "slower"}
    assert [(each.ratio, each.reason) for each in more.candidates] == [(None, "")] * 3


def test_a_ruled_out_choice_returns_with_a_later_row() -> None:
    header = of(3, row("a", "chosen", 1, 1.0), row("b", "slower", 1, 3.0), row("c", "slower", 1, 2.0))
    failed = of(2, row("a", "failed", 2), row("b", "chosen", 1, 3.0))
    found = merge(header, failed)
    assert (found.choice, found.preferred) == ("c", ("a", "natural"))
    assert statuses(found) == {"a": "failed", "b": "slower", "c": "chosen"}
    again = merge(found, of(1, row("a", "chosen", 3, 1.5)))
    assert (again.choice, again.preferred) == ("a", None)


def test_times_are_compared_as_times() -> None:
    """Two o'clock in Berlin is before half past one in London."""
    early = of(1, row("a", "chosen", 1, 1.0), title="early")
    early = replace(early, created="2025-01-01T14:00:00+01:00")
    late = replace(early, created="2025-01-01T13:30:00", title="late")
    assert merge(early, late).title == merge(late, early).title == "late"


def test_a_later_import_replaces_nothing_that_was_measured_here() -> None:
    own = of(1, row("a", "chosen", 1, 1.0), row("b", "slower", 1, 2.0))
    given = from_elsewhere(
        of(2, row("b", "chosen", 2, 0.5), row("a", "slower", 2, 9.0), row("c", "tie", 2, 0.6)), "imported"
    )
    found = merge(own, given)
    assert (found.choice, found.created, found.origin) == ("a", TIMES[0], "")
    assert {each.backend: (each.median_ms, each.origin) for each in found.candidates} == {
        "a": (1.0, ""),
        "b": (2.0, ""),
        "c": (0.6, "imported"),
    }
