"""Drift: whether live calls still take what was measured. Off unless $ATTN_DISPATCH_SENTINEL is a share above 0.

That share of the calls of a measured problem is timed. Where the 95 % interval of their median leaves the stored one by
more than a tenth, the decision is marked; `inspect` shows it, and `profile` measures it again. Only calls without
gradients are watched: what was measured of the others includes a backward pass, which attend() does not see.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from attn_dispatch.log import logger
from attn_dispatch.settings import cache_folder, sentinel_share
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Drift, Row
from attn_dispatch.store.folder import Store
from attn_dispatch.text import titled
from attn_dispatch.tuning.intervals import median_interval

SAMPLES = 25  #: the latest that are judged
MARGIN = 0.10  #: what a call in the midst of a program may differ from one in a trial
FIRST = 3  #: timed calls that are passed over: they may build something

Run = Callable[..., Any]


def watched(run: Run, problem: Problem, decision: Decision) -> Run:
    """The same, timed now and then, where the sentinel is on and there is a measurement to compare with."""
    share = sentinel_share()
    row = next((row for row in decision.candidates if row.id == decision.chosen), None)
    known = row is not None and None not in (row.median_ms, row.low_ms, row.high_ms)
    if share <= 0 or problem.needs_grad or decision.source != "measured" or row is None or not known:
        return run
    return _Watch(run, problem, decision, row, share)


class _Watch:
    def __init__(self, run: Run, problem: Problem, decision: Decision, row: Row, share: float) -> None:
        self._run, self._problem, self._decision, self._row, self._share = run, problem, decision, row, share
        self._random = random.Random(0)  # its own: the program's random numbers stay as they are
        self._seen: deque[float] = deque(maxlen=SAMPLES)
        self._left_out = FIRST
        self._marked = decision.drift is not None

    def __call__(self, *args: Any, **tensors: Any) -> Any:
        if self._marked or self._random.random() >= self._share or self._capturing():
            return self._run(*args, **tensors)
        self._synchronize()
        start = time.perf_counter()
        result = self._run(*args, **tensors)
        self._synchronize()
        self._note((time.perf_counter() - start) * 1e3)
        return result

    def _note(self, call_ms: float) -> None:
        if self._left_out:
            self._left_out -= 1
            return
        self._seen.append(call_ms)
        if len(self._seen) == SAMPLES and drifted(list(self._seen), self._row):
            self._mark()

    def _mark(self) -> None:
        self._marked = True
        samples = list(self._seen)
        interval, median_ms = median_interval(samples), statistics.median(samples)
        drift = Drift(
            median_ms=median_ms,
            low_ms=interval.low,
            high_ms=interval.high,
            samples=len(samples),
            seen=datetime.now(UTC).isoformat(timespec="microseconds"),
        )
        logger.warning(
            "%s takes %.3g ms, %.3g were measured: %s",
            titled(*self._row.id),
            median_ms,
            self._row.median_ms,
            self._problem,
        )
        Store(cache_folder()).amend(self._decision, drift=drift)

    def _capturing(self) -> bool:
        return self._problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)


def drifted(samples_ms: list[float], row: Row) -> bool:
    """Whether the samples' 95 % interval lies outside the stored one, and a tenth beyond it."""
    assert row.low_ms is not None
    assert row.high_ms is not None
    interval = median_interval(samples_ms)
    return interval.low > row.high_ms * (1 + MARGIN) or interval.high < row.low_ms * (1 - MARGIN)
