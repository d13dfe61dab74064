"""What limits trials: state of PyTorch that they must respect (CUDA graph capture, traces, random numbers, modes), and
the seconds per minute that attend() calls add on them, however many new problems appear.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import private
from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels.device_cache import capturing, compiling
from attn_dispatch.log import say_once
from attn_dispatch.machine import memory
from attn_dispatch.settings import mode
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import without_autocast
from attn_dispatch.store.decision import CandidateId, Decision
from attn_dispatch.text import gib, one_line, printable, titled
from attn_dispatch.tuning.candidates import Candidate, Request, static_choice


def preserved_rng(problem: Problem) -> AbstractContextManager[None]:
    """Restore the state of the random number generators after a trial with dropout.

    Only with dropout: the generator belongs to the process, so numbers that other threads draw meanwhile repeat.
    """
    if not problem.dropout_p:
        return nullcontext()
    return torch.random.fork_rng([problem.device] if problem.device.type == "cuda" else [])


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return private.graph_task() >= 0


def cannot_measure(device: torch.device) -> bool:
    """Whether calls are captured, traced or transformed, so that nothing can be timed."""
    return capturing(device) or tracing.is_traced() or _forbids_hooks()


def without_saving_hooks() -> AbstractContextManager[object]:
    """Inside, no saved-tensor hook of the caller sees what is saved."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same) if private.saving_tensors() else nullcontext()


def _forbids_hooks() -> bool:
    """Whether saved-tensor hooks are forbidden, as they are inside the transforms of torch.func that take gradients."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            return False
    except RuntimeError:
        return True


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Run a trial without the caller's autocast, inference mode, saved-tensor hooks (set by checkpointing), default
    device and dispatch modes.
    """

    with (
        without_autocast(device.type),
        torch.inference_mode(False),
        without_saving_hooks(),
        private.without_modes(),
        on_cpu(),
        compiling(),
    ):
        yield


def on_cpu() -> AbstractContextManager[object]:
    """The default device is the CPU. Nothing where it is so already: the context costs each operator microseconds of
    Python, which would count as the candidates' time.
    """
    # By a new tensor: torch 2.6's get_default_device does not see `with torch.device(...)`, and fails once a default
    # device was set and taken back.
    return nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


TRIAL_SPACE = 400 << 20  #: bytes of address space that the threads of a trial, their pools and arenas may map


def lacks_space() -> bool:
    """Whether a limit of address space leaves too little for a trial, which could end the process; said once."""
    left = memory.address_space_left()
    if left is None or left >= TRIAL_SPACE:
        return False
    say_once(f"not measured: the limit of address space (RLIMIT_AS) leaves less than {gib(TRIAL_SPACE)}")
    return True


def measure(request: Request, budget_s: float | None, **options: Any) -> Decision | None:
    """Run a trial, with the arguments of `tuner.trial_of`.

    None also where the machine lacks memory, threads or files beside a trial, which is warned of once.
    """
    if lacks_space():
        return None
    from attn_dispatch.tuning import guard, tuner  # loaded only when something is measured

    try:
        with isolated(request.problem.device), preserved_rng(request.problem):
            return tuner.run_trial(request, budget_s, **options)
    except Exception as error:
        if isinstance(error, BackendFailed) or not guard.is_shortage(error):
            raise
        say_once(f"not measured, too little memory: {printable(str(request.problem))} ({one_line(error)})")
        return None


def passes_hard_cases(request: Request, name: CandidateId, *, run: bool) -> bool:
    """Whether a candidate that no trial of this problem has chosen passed the hard cases, or passes them now if `run`.

    Raises:
        BackendFailed: it left the device unusable.
    """
    from attn_dispatch.tuning import gate, guard, rounds  # loaded only when something is tried

    candidate = next((each for each in request.able if each.id == name), None)
    checks = gate.Gate(request.problem, request.address)
    if candidate is None or not run or lacks_space():
        return candidate is not None and checks.has_passed(candidate)
    try:
        with isolated(request.problem.device):
            return rounds.exhausted(checks.check_hard_cases(candidate)) is None
    except Exception as error:
        if not guard.is_shortage(error):
            raise
        return False


def why_variant(request: Request, candidate: Candidate) -> str:
    """Why a candidate is not admitted to the calls of a family that ask for batch invariance; empty where it is, by
    a check now or before.
    """
    from attn_dispatch.tuning import gate, invariance, rounds  # loaded only when something is tried

    if cannot_measure(request.problem.device):
        return "is not checked while a call is captured, traced or transformed"
    with isolated(request.problem.device):
        if mode() != "off":
            checks = gate.Gate(request.problem, request.address)
            rejected = rounds.exhausted(checks.check_hard_cases(candidate))
            return rejected.reason if rejected else checks.why_not(candidate, invariance.difference)
        try:  # no file is read or written
            return invariance.difference(candidate.backend, request.problem)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            return one_line(error)


def why_refuted(request: Request, decision: Decision) -> str:
    """Why another machine's choice does not hold here; empty where it does: it passes the hard cases, and a trial of it
    and the static choice alone keeps it.
    """
    static = static_choice(request.able)
    if static is None or static.id == decision.chosen:
        return "" if passes_hard_cases(request, decision.chosen, run=True) else "it fails the hard cases"
    from attn_dispatch.tuning.tuner import CHECK  # loaded only when something is measured

    found = measure(request, None, waiting=True, limits=CHECK, prior=decision, changed=[static.id])
    if found is None or found.chosen == decision.chosen:
        return "" if found else "too little memory to check it"
    row = next(row for row in found.candidates if row.id == decision.chosen)
    return f"{row.ratio:.3g} times the time of {titled(*found.chosen)} here" if row.ratio else row.reason


WINDOW_S = 60.0  #: seconds over which trials are limited


class RateLimit:
    """Sums the seconds of trials within the last minute. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trials: deque[tuple[float, float]] = deque()

    def allows(self, most_s: float) -> bool:
        """Whether trials within the last minute took less than `most_s` seconds, so that another may start."""
        now = self._clock()
        while self._trials and self._trials[0][0] <= now - WINDOW_S:
            self._trials.popleft()
        return sum(seconds for _, seconds in self._trials) < most_s

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the seconds of a trial."""
        start = self._clock()
        yield
        self._trials.append((self._clock(), self._clock() - start))

    def clear(self) -> None:
        """Forget all trials."""
        self._trials.clear()
