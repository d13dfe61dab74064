"""How much of a minute may go into measuring."""

from __future__ import annotations

from attn_dispatch.decisions.rate_limit import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_spent_counts_for_a_minute() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.allows(10.0)
    pace.spend(6.0)
    clock.now += 20
    assert pace.allows(10.0)
    pace.spend(5.0)
    assert not pace.allows(10.0)
    clock.now += 39.9
    assert not pace.allows(10.0)
    clock.now += 0.1
    assert pace.allows(10.0)
    assert not pace.allows(5.0)


def test_nothing_allowed_and_everything_allowed() -> None:
    pace = Pace(Clock())
    assert not pace.allows(0.0)
    pace.spend(1e9)
    assert pace.allows(float("inf"))
    assert not pace.allows(1e9)
    pace.clear()
    assert pace.allows(1e9)
