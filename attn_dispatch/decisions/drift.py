"""Drift check: compares times of live calls with the stored ones. Off unless $ATTN_DISPATCH_SENTINEL is above 0.

That share of the calls of a measured problem is timed. Where the 95 % interval of their median lies more than a tenth
outside the stored interval, the decision is marked; `inspect` shows it, and `profile` measures it again. Only calls
without gradients are timed: measurements with gradients include a backward pass, which attend() does not run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from attn_dispatch.kernels.device_cache import capturing
from attn_dispatch.log import logger
from attn_dispatch.settings import cache_folder, sentinel_share
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Drift, Row
from attn_dispatch.store.folder import Store
from attn_dispatch.text import titled
from attn_dispatch.tuning.clocks import Lead, cuda_sample
from attn_dispatch.tuning.intervals import median_interval

SAMPLES = 25  #: latest timed calls that are compared
DRIFT_MARGIN = 0.10  #: relative difference allowed between a call in a program and one in a trial
WARMUP_CALLS = 3  #: timed calls that are ignored: they may compile or plan

Run = Callable[..., Any]


def sampled(run: Run, problem: Problem, decision: Decision) -> Run:
    """`run`, with a share of its calls timed if the check is on and a measurement exists to compare with."""
    share = sentinel_share()
    row = next((row for row in decision.candidates if row.id == decision.chosen), None)
    known = row is not None and None not in (row.median_ms, row.low_ms, row.high_ms)
    if share <= 0 or problem.needs_grad or decision.source != "measured" or row is None or not known:
        return run
    return _SampledRun(run, problem, decision, row, share)


class _SampledRun:
    def __init__(self, run: Run, problem: Problem, decision: Decision, row: Row, share: float) -> None:
        self._run, self._problem, self._decision, self._row, self._share = run, problem, decision, row, share
        self._random = random.Random(0)  # a separate generator: the program's random numbers stay the same
        self._samples_ms: deque[float] = deque(maxlen=SAMPLES)
        self._warmup_left = WARMUP_CALLS
        self._marked = decision.drift is not None
        self._lead = Lead()  # on CUDA

    def __call__(self, *args: Any, **tensors: Any) -> Any:
        device = self._problem.device
        if self._marked or self._random.random() >= self._share or capturing(device):
            return self._run(*args, **tensors)
        if device.type == "cuda":
            return self._sampled_on_cuda(args, tensors)
        start = time.perf_counter()
        result = self._run(*args, **tensors)
        self._note((time.perf_counter() - start) * 1e3)
        return result

    def _sampled_on_cuda(self, args: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
        """Run the call as a trial samples it: by events, behind a lead."""
        results: list[Any] = []
        sample = cuda_sample(
            self._problem.device,
            lambda: results.append(self._run(*args, **tensors)),
            lead_ms=self._lead.for_calls(1),
            clock=time.perf_counter,
        )
        if self._lead.is_valid(sample, 1):
            self._note(max(sample.device_ms, sample.host_ms))
        return results[0]

    def _note(self, call_ms: float) -> None:
        if self._warmup_left:
            self._warmup_left -= 1
            return
        self._samples_ms.append(call_ms)
        if len(self._samples_ms) == SAMPLES and drifted(list(self._samples_ms), self._row):
            self._mark()

    def _mark(self) -> None:
        self._marked = True
        samples = list(self._samples_ms)
        interval, median_ms = median_interval(samples), statistics.median(samples)
        drift = Drift(
            median_ms=median_ms,
            low_ms=interval.low,
            high_ms=interval.high,
            samples=len(samples),
            seen=datetime.now(UTC).isoformat(timespec="microseconds"),
        )
        logger.warning(
            "%s takes %.3g ms, the stored decision has %.3g ms: %s",
            titled(*self._row.id),
            median_ms,
            self._row.median_ms,
            self._problem,
        )
        Store(cache_folder()).amend(self._decision, drift=drift)


def drifted(samples_ms: list[float], row: Row) -> bool:
    """Whether the 95 % interval of the samples' median lies outside the stored one by more than `DRIFT_MARGIN`."""
    assert row.low_ms is not None
    assert row.high_ms is not None
    interval = median_interval(samples_ms)
    return interval.low > row.high_ms * (1 + DRIFT_MARGIN) or interval.high < row.low_ms * (1 - DRIFT_MARGIN)
