"""The limit on seconds of trials per minute."""

from __future__ import annotations

from attn_dispatch.decisions.trial_limits import RateLimit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_trials_count_for_a_minute() -> None:
    clock = Clock()
    rate_limit = RateLimit(clock)
    assert rate_limit.allows(10.0)
    rate_limit.add(6.0)
    clock.now += 20
    assert rate_limit.allows(10.0)
    rate_limit.add(5.0)
    assert not rate_limit.allows(10.0)
    clock.now += 39.9
    assert not rate_limit.allows(10.0)
    clock.now += 0.1
    assert rate_limit.allows(10.0)
    assert not rate_limit.allows(5.0)


def test_no_time_and_unlimited_time() -> None:
    rate_limit = RateLimit(Clock())
    assert not rate_limit.allows(0.0)
    rate_limit.add(1e9)
    assert rate_limit.allows(float("inf"))
    assert not rate_limit.allows(1e9)
    rate_limit.clear()
    assert rate_limit.allows(1e9)
