"""Trials that are paid for out of the running work, in mode `online`.

A problem without a decision runs by the best guess. Its trial goes on in slices at the end of its calls, whenever
`$ATTN_DISPATCH_OVERHEAD` of the time spent in calls of problems on trial exceeds what trials have taken so far. The
guess runs until the trial has ended; then routes are dropped, and the next call takes the decision.

A slice takes place in the caller's thread, never while a graph is captured or a backward pass runs. Within a process, a
problem with gradients that was ever called under saved-tensor hooks keeps its guess: a recomputation in a checkpoint
must go the way of its forward pass. Its decision is stored for the next process.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch

from attn_dispatch import private, process_state, settings
from attn_dispatch.decisions import decide, look_up, trial_limits
from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import is_result_known
from attn_dispatch.kernels.contract import runner
from attn_dispatch.kernels.device_cache import capturing
from attn_dispatch.log import logger
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision
from attn_dispatch.system import in_forked_child
from attn_dispatch.text import one_line
from attn_dispatch.tuning.candidates import Request

SLICE_S = 0.004  #: seconds that must be saved before a slice begins, so that a slice's own cost is small beside it
SLICE_CALLS = 0.25  #: calls of the guess that a slice may take besides; its first step may take longer
START_S = 0.02  #: seconds that the first slice of a trial is expected to take
HELD_SHARE = 0.05  #: share of the free memory that trials may hold between slices
MOST_AT_ONCE = 2  #: trials that go on at the same time, so that one ends before many have begun
IDLE_CALLS = 200  #: calls of other problems after which a trial does not keep others from beginning

Run = Callable[..., Any]


class _Account:
    """Seconds of calls of problems on trial, and of slices; `calls` counts the former."""

    live_s = spent_s = 0.0
    calls = 0

    def clear(self) -> None:
        vars(self).clear()

    def left_s(self, share: float) -> float:
        return share * self.live_s - self.spent_s


_account = _Account()
_trials: dict[tuple[str, Problem], _LiveTrial] = {}
_slicing = process_state.lock()  # held through a slice: nobody waits for it
process_state.register(process_state.DECISIONS, _trials.clear, _account.clear)


def sampled(run: Run, problem: Problem, decision: Decision) -> Run:
    """`run`, with slices of the problem's trial after its calls.

    Raises:
        InvalidInput: $ATTN_DISPATCH_OVERHEAD is wrong.
    """
    key = decision.silicon, problem
    with decide.lock:
        trial = _trials.get(key)
        if trial is None:
            _abandon_forgotten()
            trial = _trials[key] = _LiveTrial(problem, decision)

    def sampled_run(*args: Any, **tensors: Any) -> Any:
        current = trial.run_instead(run)
        if trial.ended or is_result_known() or capturing(problem.device):
            return current(*args, **tensors)
        if problem.device.type == "cuda":
            return trial.timed_by_events(current, *args, **tensors)
        synchronize(problem.device)
        start = time.perf_counter()
        result = current(*args, **tensors)
        synchronize(problem.device)
        trial.note(time.perf_counter() - start)
        trial.watch_backward(result)
        return result

    return sampled_run


class _LiveTrial:
    """A problem's trial, from its first call by the guess until it is decided or given up."""

    def __init__(self, problem: Problem, guess: Decision) -> None:
        self.problem, self.guess = problem, guess
        self.ended = False
        self.held_bytes = 0
        self._share = settings.overhead_share()
        self._stored = decide.on_trial.get((guess.silicon, problem))
        self._new_run: Run | None = None
        self._pinned = False
        self._switching = process_state.lock()  # guards `_pinned`, `_new_run`, `ended` and `_events`
        self._live_s: deque[float] = deque(maxlen=5)
        self._events: deque[Any] = deque(maxlen=64)
        self._last_call = 0
        self._backward_s = 0.0  # unknown before the gate ran the guess
        self._trial: Any = None  # a tuner.Trial, and its steps
        self._steps: Any = None
        self._need_s = START_S
        self._worked_s = self._slice_start = 0.0

    def run_instead(self, run: Run) -> Run:
        """`run`, or the decision's once the trial has ended; notes that a forward pass may be repeated."""
        if self.problem.needs_grad and not self._pinned and private.saving_tensors():
            with self._switching:
                self._pinned = not self.ended
        return self._new_run or run

    def timed_by_events(self, run: Run, *args: Any, **tensors: Any) -> Any:
        """Run on a CUDA device; times are noted when they are known, without waiting."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = run(*args, **tensors)
        end.record()
        self._events.append((start, end))
        self.watch_backward(result)
        with self._switching:
            ended = list(takewhile(lambda each: each[1].query(), self._events))
            for _ in ended:
                self._events.popleft()
        for first, last in ended:
            self.note(first.elapsed_time(last) / 1e3)
        return result

    def watch_backward(self, result: Any) -> None:
        """Count the backward pass of a call's out, if it is ever run."""
        out = result[0] if isinstance(result, tuple) else result
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, grad: torch.Tensor) -> None:
        _account.live_s += self._backward_s

    def note(self, call_s: float) -> None:
        """Add the seconds of a call, and run a slice if enough is saved.

        Raises:
            BackendFailed: a candidate left the device unusable.
        """
        _account.live_s += call_s
        _account.calls += 1
        self._last_call = _account.calls
        self._live_s.append(call_s)
        if _account.left_s(self._share) < max(self._need_s, SLICE_S) or not self._may_go_on():
            return
        with ExitStack() as held:
            for lock in (_slicing, decide.measuring):
                if not lock.acquire(blocking=False):
                    return
                held.callback(lock.release)
            self._slice()

    def abandon(self) -> None:
        """End the trial without a decision: the guess stays."""
        self._steps = self._trial = None
        self.ended, self.held_bytes = True, 0

    def _may_go_on(self) -> bool:
        """Whether a slice may run here, and the trial has begun or may begin."""
        if trial_limits.in_backward() or trial_limits.cannot_measure(self.problem.device) or trial_limits.lacks_space():
            return False
        _abandon_forgotten()
        others = [each for each in list(_trials.values()) if each._steps is not None and each is not self]
        busy = sum(_account.calls - each._last_call < IDLE_CALLS for each in others)
        return not self.ended and (self._steps is not None or busy < MOST_AT_ONCE)

    def _slice(self) -> None:
        """Take steps while they are paid for; whatever fails ends the trial, not the call."""
        self._slice_start = time.perf_counter()
        try:
            if not self.ended:
                with trial_limits.isolated(self.problem.device), trial_limits.preserved_rng(self.problem):
                    (self._begin if self._steps is None else self._go_on)()
        except Exception as error:
            logger.warning("the trial beside calls of %s was given up: %s", self.problem, one_line(error))
            self._end(None)
            if isinstance(error, BackendFailed):  # the device is lost
                raise
        except BaseException:  # Ctrl-C
            self._end(None)
            raise
        finally:
            self._worked_s = self._clock()
            _account.spent_s += time.perf_counter() - self._slice_start

    def _go_on(self) -> None:
        most_s = SLICE_S + SLICE_CALLS * statistics.median_low(self._live_s)
        others = sum(each.held_bytes for each in list(_trials.values()) if each is not self)
        trial, steps = self._trial, self._steps
        try:
            while True:
                self._need_s = next(steps)
                spent_s = time.perf_counter() - self._slice_start
                if spent_s + self._need_s >= most_s or _account.left_s(self._share) - spent_s < self._need_s:
                    return
        except StopIteration as end:
            self._end(end.value)
        finally:
            both_s = trial.first_call_s  # forward and backward, where gradients are needed
            if both_s is not None:
                self._backward_s = max(0.0, both_s - statistics.median_low(self._live_s))
            self.held_bytes = trial.pause(HELD_SHARE * available_bytes(self.problem.device) - others)

    def _begin(self) -> None:
        """Begin the trial; end it where neighbours that were measured meanwhile are sure.

        In a slice of its own: the first one of a process loads modules.
        """
        from attn_dispatch.tuning import tuner  # loaded only when something is measured

        request = Request.of(self.problem)
        learned = decide.sure_prediction(request) if self._stored is None else None
        options: dict[str, Any] = {"first": self.guess.chosen, **look_up.as_prior(self._stored)}
        options |= {"live_s": statistics.median_low(self._live_s), "clock": self._clock}
        self._trial = learned or tuner.trial_of(request, settings.budget_ms() / 1e3, waiting=True, **options)
        if learned is not None or self._trial is None:
            self._end(learned)
            return
        self._steps, self._need_s = self._trial.steps(), 0.0

    def _clock(self) -> float:
        """Seconds that the trial's slices took."""
        return self._worked_s + time.perf_counter() - self._slice_start

    def _end(self, decision: Decision | None) -> None:
        """Store and use the decision, or keep the guess; the next call finds a plain route."""
        self.abandon()
        with self._switching:
            rows = () if decision is None else decision.candidates
            wrong = {row.id for row in rows if row.status in ("incorrect", "quarantined")}
            proven_wrong = self.guess.chosen in wrong
            use = not self._pinned or proven_wrong
            decide.end_trial(self.problem, self.guess, decision, use=use)
            if decision is not None and use:
                self._new_run = runner(registry.load(decision.choice), decision.order, self.problem, None)
        _trials.pop((self.guess.silicon, self.problem), None)
        with decide.lock:
            process_state.forget(process_state.ON_DEVICE)


def _abandon_forgotten() -> None:
    """End the trials of problems that `profile` has decided meanwhile, or that too many others wait behind."""
    for key, each in list(_trials.items()):
        if key not in decide.on_trial:
            each.abandon()
            _trials.pop(key, None)


def _abandon_all() -> None:
    """In a forked child: trials are the parent's, and other threads may have been amid a slice."""
    for trial in _trials.values():
        trial.abandon()
    _trials.clear()
    _account.clear()
    decide.on_trial.clear()


in_forked_child(_abandon_all)
