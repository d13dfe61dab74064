"""One call of the decided backend: its run function, its result, its failures; and observers, which are called
with the problem of each attend() call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.decisions import decide
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.trial_limits import cannot_measure
from attn_dispatch.errors import AttnDispatchError, BackendFailed
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Result, runner, specialized
from attn_dispatch.private import CheckpointStop, forward_ad
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Call, Problem
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import titled

NOT_WRAPPED = (AttnDispatchError, CheckpointStop)  #: exceptions that are not wrapped in BackendFailed
MAX_CALLS = 4096  #: entries of the table of problems; past this the oldest is made anew if needed


class Rewritten(NamedTuple):
    """What a call is instead: other calls, whose results `join` puts together; without any, `join` computes the result.

    `explained`: the calls and explanations that explain() shows, where `calls` depend on results or other ranks.
    """

    calls: Iterable[Call]
    join: Callable[[list[Any]], Any]
    explained: Callable[[], Iterable[Call | Explanation]] | None = None


def only(results: list[Any]) -> Any:
    """The `join` of a single call."""
    return results[0]


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A problem with the decided backend's run function; `backend` is its title in messages, empty for a node."""

    run: Callable[..., Result]
    problem: Problem
    backend: str

    def parts(self, result: Any, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """out and lse (None if absent) of the backend's result.

        Raises:
            BackendFailed: the result has another type, or lacks an lse that was asked for.
        """
        out, lse = result if type(result) is tuple and len(result) == 2 else (result, None)
        if not isinstance(out, Tensor):
            kind = type(result).__name__
            raise BackendFailed(f"{self.backend} returned a {kind}, neither out nor (out, lse), for {self.problem}")
        if with_lse and not isinstance(lse, Tensor):
            raise BackendFailed(f"{self.backend} was asked for lse and did not return it for {self.problem}")
        return out, lse

    def result(self, q: Tensor, k: Tensor, v: Tensor, /, **tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the backend: out, and lse or None. Raises BackendFailed for any error of it, or if it lacks lse.

        Args:
            tensors: the others of the call by attend()'s names; those that are None are left out.
        """
        given = {name: x for name, x in tensors.items() if x is not None}
        try:
            result = self.run(q, k, v, self.problem, **given)
        except NOT_WRAPPED:
            raise
        except Exception as error:
            raise self.failure(error) from error
        return self.parts(result, self.problem.return_lse)

    def failure(self, error: Exception) -> BackendFailed:
        """The exception to raise for an error that the backend raised."""
        if not self.backend:  # a node of autograd, which has wrapped its own: the caller's hooks raised it
            raise error
        text = f"{self.backend} failed on {self.problem}: {type(error).__name__}: {error}"
        if tracing.is_transformed() or forward_ad._current_level >= 0:
            text += "\nForward-mode and second derivatives need backend='manual', or no forced backend"
        return BackendFailed(text)


# By forced backend and order, and by number of threads too, as decisions are.
_calls: dict[tuple[Problem, str | None, str | None, int], ResolvedCall] = {}
process_state.register(process_state.ROUTES, _calls.clear)
process_state.register(process_state.ON_DEVICE, _calls.clear)


def made(
    problem: Problem, backend: str | None, order: str | None, traced: bool, like: Call | None = None
) -> tuple[Decision, Callable[..., Result], bool]:
    """Decide for a call, of which observers are told, and make the function that runs it.

    Where a trial goes on beside the problem's calls, the function pays for it.

    Args:
        like: a call, where the tensors of all have its shapes and strides.

    Returns:
        The decision, the function, and whether this takes and returns tensors with heads first.
    """
    shared, forced = measured_for(problem), backend is not None or order is not None
    notify(shared)
    if forced:
        decision = decide.forced_decision(problem, backend, order)
    else:
        decision = decide.decision_while_traced(problem) if traced else decide.decision_for(problem)
    run, heads_first = _functions(problem, decision, like)  # not under the lock: it may build tables
    if traced:
        return decision, run, False
    with decide.lock:
        latest = decision if forced else decide.latest(problem, decision)
        if latest.chosen != decision.chosen:
            run, heads_first = _functions(problem, latest)
        asked = () if forced else (problem, shared)
        on_trial = next((each for each in asked if (latest.silicon, each) in decide.on_trial), None)
        if heads_first is not None and not (_observers or on_trial):
            return latest, heads_first, True
        run = observed(run, shared)
        if on_trial is not None:
            from attn_dispatch.decisions import online  # mode `online` alone

            run = online.sampled(run, on_trial, latest)
    return latest, run, False


def _functions(
    problem: Problem, decision: Decision, like: Call | None = None
) -> tuple[Callable[..., Result], Callable[..., Result] | None]:
    """What a decision's backend runs for tensors with tokens first; and with heads first, where it has a function.

    Raises:
        BackendFailed: the backend's `specialized` raised.
    """
    backend, order = registry.load(decision.choice), decision.order
    if like is None:
        return runner(backend, order, problem, None), None
    try:
        first = specialized(backend, order, problem, like.qkv, heads_first=True) if like.layout == "bhnd" else None
        return runner(backend, order, problem, like.tokens_first if first is None else None), first
    except NOT_WRAPPED:
        raise
    except Exception as error:
        raise ResolvedCall(backend.run, problem, titled(*decision.chosen)).failure(error) from error


def resolve(problem: Problem, backend: str | None = None, order: str | None = None) -> ResolvedCall:
    """The decided or forced backend's run function for a problem; errors as of `attend`."""
    traced, key = tracing.is_traced(), (problem, backend, order, torch.get_num_threads())
    if not traced and (found := _calls.get(key)) is not None:
        return found
    forgotten = process_state.forgotten
    decision, run, _ = made(problem, backend, order, traced)
    call = ResolvedCall(run, problem, titled(*decision.chosen))
    with decide.lock:
        if forgotten == process_state.forgotten and not cannot_measure(problem.device):  # see routes.new_route
            _calls[key] = call
            decide.drop_oldest(_calls, MAX_CALLS)
    return call


# --- observers --------------------------------------------------------------------------------------------------------

Observer = Callable[[Problem], object]
Around = Callable[[Callable[..., Any], Problem], Callable[..., Any]]

_observers: list[tuple[Observer, Around | None]] = []


def notify(problem: Problem) -> None:
    """Call every observer with a problem."""
    for observer, _ in tuple(_observers):
        observer(problem)


def observed(run: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    """The function that runs a problem, as observers have it called."""
    for _, around in tuple(_observers):
        run = run if around is None else around(run, problem)
    return run


@contextmanager
def observing(observer: Observer, around: Around | None = None) -> Iterator[None]:
    """Call `observer` with each problem of a call inside the block, at least once per problem; `record` uses it.

    Args:
        around: takes the function that runs a problem, and returns what to call in its place inside the block.
    """
    entry = observer, around
    with decide.lock:
        _observers.append(entry)
        process_state.forget(process_state.ROUTES)
    try:
        yield
    finally:
        with decide.lock:
            _observers.remove(entry)
            process_state.forget(process_state.ROUTES)  # they hold what observers put around them
