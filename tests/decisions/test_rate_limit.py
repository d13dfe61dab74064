"""The limit on seconds of trials per minute."""

from __future__ import annotations

from attn_dispatch.decisions.trial_limits import RateLimit
from tests.support.virtual_clock import VirtualClock


def test_trials_count_for_a_minute() -> None:
    clock = VirtualClock()
    limit = RateLimit(clock)
    assert not limit.allows(0.0)
    for seconds in (6.0, 5.0):
        assert limit.allows(10.0)
        with limit.counting():
            clock.sleep(seconds)
    assert not limit.allows(10.0)
    assert limit.allows(float("inf"))
    clock.sleep(54.9)
    assert not limit.allows(10.0)
    clock.sleep(0.1)
    assert limit.allows(10.0)
    assert not limit.allows(5.0)
    limit.clear()
    assert limit.allows(1.0)
