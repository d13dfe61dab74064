"""The race of one trial: times the admitted candidates against one another within the budget and chooses one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from attn_dispatch.kernels.contract import traces
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.machine.load import Load
from attn_dispatch.settings import cache_folder, expected_calls
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import TIMED, Decision, Row
from attn_dispatch.store.quarantine import CrashMarker, crash_marker
from attn_dispatch.text import one_line
from attn_dispatch.tuning import choice, guard, intervals
from attn_dispatch.tuning.candidates import Candidate, Request, ending_on_lost_device
from attn_dispatch.tuning.clocks import ONE_TIME_MS, RETAKES, CudaStopwatch, HostStopwatch, Stopwatch
from attn_dispatch.tuning.oracle import Incorrect
from attn_dispatch.tuning.rounds import Around, Rounds, Steps, ending_on_failure, sampled_in_rounds

TARGET = 0.02  #: half-width of a median's interval, as its share, that a race goes on for where nobody waits
MAY_WIN_RATIO = 1.5  #: a candidate left out at a lower ratio might still be the fastest
MAY_WIN_SHORT_RATIO = 3.0  #: the same where its calls are short: one-time work slows them
LOOK_SHARE = 0.03  #: share of the time of samples that looks at their results may take
LOOKED_AT = 2**13  #: entries of each tensor, about

CallOf = Callable[[Candidate], Callable[[], Sequence[Tensor]]]


@dataclass
class Race:
    """One race; all tables are keyed by candidate title.

    `runners` are ordered by preference. `clock` measures the budget, in seconds; `stepped` is whether other code
    runs between two steps. A candidate whose results change fails with `Incorrect`.
    """

    request: Request
    runners: dict[str, tuple[Candidate, choice.Admitted]]
    incumbent: str
    clock: Callable[[], float] = time.perf_counter
    stepped: bool = False
    differences: Sequence[float] = ()  #: see `Gate.differences`
    rounds: Rounds = field(init=False)
    outcomes: dict[str, choice.Outcome] = field(default_factory=dict[str, choice.Outcome])
    plan_ms: dict[str, float] = field(default_factory=dict[str, float])  #: of a first call in this thread, on CUDA
    stopwatch: Stopwatch | None = None  #: by default the device's, with crash markers and capped memory
    most_rounds: int = 1000
    _calls: dict[str, _Watched] = field(default_factory=dict[str, "_Watched"])
    _markers: dict[str, CrashMarker] = field(default_factory=dict[str, CrashMarker])
    _entered: ExitStack = field(default_factory=ExitStack)

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def run(self, call_of: CallOf, remaining_s: float, *, brief: bool = False) -> Steps[None]:
        """Time the candidates round by round, within what remains of the budget (seconds).

        Where other code runs between two steps, call `pause` before it.

        Args:
            call_of: makes the call of a candidate that is timed.
            brief: end once no comparison is open, as also in steps.
        """
        if len(self.runners) == 1 and remaining_s <= 0:
            # Nothing to compare with and no budget left: the run that the gate checked is the only sample.
            ((only, (_, admitted)),) = self.runners.items()
            self.rounds = Rounds({only: intervals.Timing((admitted.call_ms,), admitted.call_ms)}, {}, {}, 0)
            return
        self._calls = {name: _Watched(call_of(each), self.differences) for name, (each, _) in self.runners.items()}
        stopwatch = self.stopwatch or stopwatch_of(self.problem.device, self.stepped)
        around: Around = nullcontext if self.stopwatch is not None else self._guarded
        failures = dict[str, Exception]()
        try:
            if isinstance(stopwatch, CudaStopwatch):
                # Libraries keep some of what they build for each thread, as cuDNN its plans: that was the guard's.
                for name, call in self._calls.items():
                    yield 0.0
                    with ending_on_failure(name, failures, around):
                        self.plan_ms[name] = stopwatch.mean_ms(call)
                stopwatch.warm()
            rounds = yield from sampled_in_rounds(
                {name: call for name, call in self._calls.items() if name not in failures},
                budget_s=remaining_s,
                short_of_rounds=isinstance(stopwatch, HostStopwatch),
                max_rounds=self.most_rounds,
                clock=self.clock,
                stopwatch=stopwatch,
                around=around,
                incumbents=(self.incumbent,),
                first_ms={name: admitted.call_ms for name, (_, admitted) in self.runners.items()},
                extra_ms={name: self._plan_share_ms(name) for name in self.runners},
                target=math.inf if brief or self.stepped else TARGET,
            )
            self.rounds = replace(rounds, failures=failures | rounds.failures)
        finally:
            self.pause()
            self._calls.clear()  # they hold the example

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A sample of a candidate: with memory capped, beside a crash marker; then its results are looked at."""
        candidate, problem, start_s = self.runners[name][0], self.problem, time.perf_counter()
        if not self._markers:
            self._entered.enter_context(guard.capped(problem.device))
        if name not in self._markers:
            names = self.request.silicon, candidate.name, candidate.version, candidate.problem_title(problem)
            self._markers[name] = self._entered.enter_context(crash_marker(cache_folder(), *names))
        self._markers[name].resume()
        try:
            with ending_on_lost_device(candidate, problem, self.request.address):
                yield
        finally:
            self._markers[name].pause()
        self._calls[name].look(time.perf_counter() - start_s)

    def pause(self) -> None:
        """Lift the limit of memory and remove the crash markers until the next sample."""
        self._markers.clear()
        self._entered.close()

    def remove(self, name: str) -> None:
        """Take a candidate out of the choice: it was timed, and its results proved wrong."""
        for table in (self.runners, self.outcomes, self.rounds.timings, self.rounds.failures):
            table.pop(name, None)

    def choose(self) -> str | None:
        """Choose a candidate as `choice.choose` does; None where none was timed beyond a first call."""
        timed = [name for name in self.runners if name in self.rounds.timings and name not in self.rounds.short_of_time]
        if not timed:
            return None
        entrants = [self._entrant(name, rank) for rank, name in enumerate(timed)]
        first = self.incumbent if self.incumbent in timed else None
        chosen, self.outcomes = choice.choose(entrants, first, calls=expected_calls())
        return chosen

    def why_provisional(self) -> str:
        """Why the choice may be another one under better conditions; empty where it is settled."""
        if self.rounds.load.disturbed:
            return "other programs took the cores while it was measured"
        unclear = [name for name, outcome in self.outcomes.items() if outcome.open]
        dropped = {name for name, ratio in self.rounds.dropped.items() if self._may_win(name, ratio)}
        unclear += sorted(dropped - set(unclear))
        return f"too few rounds to compare it with {', '.join(unclear)}" if unclear else ""

    def row(self, candidate: Candidate) -> Row | None:
        """The candidate's row: its failure, its times, or why it was not timed; None if it was not in the race."""
        name = candidate.title
        if name in self.rounds.failures:
            return candidate.measured_row("failed", one_line(self.rounds.failures[name]))
        if name in self.outcomes:
            return self._timed_row(candidate, self.outcomes[name])
        if name not in self.rounds.short_of_time or name not in self.runners:
            return None
        ratio, seen = self.rounds.dropped[name], self._first_call(name)
        text = f"its first calls took {ratio:.1f} times as long as the fastest's, and the budget was short"
        return candidate.measured_row("not_measured", text, open=self._may_win(name, ratio), **seen)

    def all_rows(
        self, candidates: Sequence[Candidate], others: Mapping[str, Row], prior: Decision | None, chosen: Candidate
    ) -> Iterator[Row]:
        """The rows of the decision: those of this race, else the `others`, else those of the prior decision."""
        earlier = {} if prior is None else {row.id: row for row in prior.candidates}
        for candidate in candidates:
            known = earlier.get(candidate.id)
            row = self.row(candidate) or others.get(candidate.title) or candidate.row
            row = row or self._earlier_row(known, candidate, chosen)
            if row.status == "failed" and known is not row:  # later trials retry it less often
                again = known is not None and (known.status, known.version) == ("failed", row.version)
                row = msgspec.structs.replace(row, failures=1 + ((known.failures or 1) if again and known else 0))
            yield row

    def _earlier_row(self, row: Row | None, candidate: Candidate, chosen: Candidate) -> Row:
        """The prior row of a candidate not measured again, compared with the chosen one's times."""
        if row is None:
            return candidate.measured_row("not_measured", "was not available when the trial began")
        if row.status not in TIMED or row.low_ms is None:
            return row
        status = "slower" if row.low_ms > self.rounds.timings[chosen.title].high_ms else "tie"
        relative = dict.fromkeys(("ratio", "ratio_low", "ratio_high"))
        return msgspec.structs.replace(row, status=status, open=False, **relative)

    def _may_win(self, name: str, ratio: float) -> bool:
        """Whether a candidate that left the race at this ratio may be the fastest: one-time work slows short calls, and
        other programs any call.
        """
        if name not in self.runners:
            return False  # its results proved wrong
        if self.rounds.load.disturbed:
            return True
        short = self.runners[name][1].call_ms <= ONE_TIME_MS
        return ratio < (MAY_WIN_SHORT_RATIO if short else MAY_WIN_RATIO)

    def _timed_row(self, candidate: Candidate, outcome: choice.Outcome) -> Row:
        timing = self.rounds.timings[candidate.title]
        may_win = self._may_win(candidate.title, self.rounds.dropped.get(candidate.title, math.inf))
        return candidate.measured_row(
            **asdict(replace(outcome, open=outcome.status != "chosen" and (outcome.open or may_win))),
            median_ms=timing.median_ms,
            low_ms=timing.low_ms,
            high_ms=timing.high_ms,
            fastest_ms=min(timing.samples_ms),
            device_ms=timing.device_ms,
            host_ms=timing.host_ms,
            rounds=len(timing.samples_ms),
            **self._first_call(candidate.title),
        )

    def _first_call(self, name: str) -> dict[str, Any]:
        admitted = self.runners[name][1]
        return {"first_ms": admitted.first_ms, "peak_bytes": admitted.peak_bytes, "error": admitted.error}

    def _entrant(self, name: str, rank: int) -> choice.Entrant:
        candidate, timing = self.runners[name][0], self.rounds.timings[name]
        # Preemption makes any first call longer.
        builds = not self.rounds.load.disturbed or candidate.backend.first_call_ms is not None
        plan_ms = max(0.0, self._first_ms(name) - timing.median_ms) if builds else 0.0
        dropped = self.rounds.dropped.get(name)
        return choice.Entrant(name, timing, candidate.workspace_bytes, rank, plan_ms, dropped)

    def _plan_share_ms(self, name: str) -> float:
        """A call's share of the first call's extra milliseconds, as known before the race."""
        admitted = self.runners[name][1]
        return choice.per_call_ms(self._first_ms(name) - admitted.call_ms, expected_calls())

    def _first_ms(self, name: str) -> float:
        """Milliseconds of a first call, without what a process does once, such as loading a library."""
        candidate, admitted = self.runners[name]
        if traces(candidate.backend):
            return admitted.first_ms  # it was built for this problem
        return min(admitted.first_ms, self.plan_ms.get(name, math.inf))


def stopwatch_of(device: torch.device, stepped: bool) -> Stopwatch:
    """The stopwatch of a race on a device; `stepped` as of `Race`."""
    if device.type == "cuda":
        return CudaStopwatch(device, warms=not stepped)
    if device.type != "cpu":
        return HostStopwatch(finish=partial(synchronize, device), shortest_ms=CudaStopwatch.shortest_ms)
    return HostStopwatch(reading=Load.so_far, retakes=0 if stepped else RETAKES)  # a step is one sample


@dataclass(eq=False)
class _Watched:
    """A call whose results are compared with its first ones after samples of it, as often as takes little time."""

    call: Callable[[], Sequence[Tensor]]
    differences: Sequence[float]  #: as of `Race`
    results: Sequence[Tensor] = ()
    first: Sequence[Tensor] = ()
    left_s: float = 0.0  #: for further looks

    def __call__(self) -> None:
        self.results = ()  # freed before the next ones are allocated
        self.results = self.call()

    def look(self, sample_s: float) -> None:
        """Look at the last results of a sample; on CUDA that waits for them, as samples do. Raises Incorrect."""
        results, self.results = self.results, ()
        self.left_s += LOOK_SHARE * sample_s
        if not self.differences or (self.first and self.left_s < 0):
            return
        start_s, parts = time.perf_counter(), [_part(x) for x in results]
        self.first = self.first or [x.clone() for x in parts]
        for x, first, allowed in zip(parts, self.first, self.differences):
            if not (off := float(torch.dist(x, first, math.inf))) <= allowed:  # NaN too
                raise Incorrect(f"a timed call gave another result than the first one, by {off:.2e}")
        self.left_s -= time.perf_counter() - start_s


def _part(x: Tensor) -> Tensor:
    """About `LOOKED_AT` entries of a tensor, evenly spaced along its longest axis."""
    axis = max(range(x.ndim), key=lambda each: x.shape[each])
    return x.transpose(0, axis)[:: -(-x.numel() // LOOKED_AT)]
