"""One call of the backend that was decided on: what runs and what comes of it. Ranks call it for whole heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.decisions import decide, observers
from attn_dispatch.errors import BackendFailed, InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import CHECKPOINT_STOP
from attn_dispatch.kernels.contract import Result, runner
from attn_dispatch.settings import sentinel_share
from attn_dispatch.spec import tracing
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem, check_seq_lens_values
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import titled

THROUGH = (InvalidInput, CHECKPOINT_STOP)  #: no failures of a backend
MOST_CALLS = 4096  #: problems of ranks remembered; past this the table starts anew, decisions stay


@dataclass(frozen=True, slots=True)
class Call:
    """A problem and what runs it; `backend` is its name for a reader."""

    run: Callable[..., Result]
    problem: Problem
    backend: str

    def parts(self, result: Any) -> tuple[Tensor, Tensor | None]:
        """out and lse of what the backend returned. Raises BackendFailed: it is something else."""
        if isinstance(result, Tensor):
            return result, None
        if type(result) is tuple and len(result) == 2 and isinstance(result[0], Tensor):
            return result
        kind = type(result).__name__
        raise BackendFailed(f"{self.backend} returned a {kind}, neither out nor (out, lse), for {self.problem}")

    def with_lse(self, result: Any) -> tuple[Tensor, Tensor]:
        """out and lse of what was asked for both. Raises BackendFailed: it is something else."""
        if type(result) is tuple and len(result) == 2 and isinstance(result[1], Tensor):
            return result
        self.parts(result)
        raise BackendFailed(f"{self.backend} was asked for lse and did not return it for {self.problem}")

    def failed(self, error: Exception) -> BackendFailed:
        return BackendFailed(f"{self.backend} failed on {self.problem}: {type(error).__name__}: {error}")


_calls: dict[Problem, tuple[Decision, Call]] = {}
process_state.register(process_state.ROUTES, _calls.clear)


def run_of(problem: Problem, decision: Decision, amid: bool) -> Callable[..., Result]:
    """What runs a problem; live calls are watched where the sentinel is on, but not `amid` a trace."""
    run = runner(registry.load(decision.choice), decision.order)
    if amid or not sentinel_share():
        return run
    from attn_dispatch.decisions import drift  # what most never use

    return drift.watched(run, problem, decision)


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    scale: float,
    seq_lens: Tensor | None,
    key_mask: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out and lse (None, unless asked for) on one device, as `attend` would decide it. Arguments as there."""
    masks = {name: x for name, x in (("seq_lens", seq_lens), ("key_mask", key_mask)) if x is not None}
    problem = Problem.of(
        q, k, v, pattern, scale=scale, return_lse=return_lse, seq_lens=seq_lens, key_mask=key_mask
    )  # fmt: skip
    call = _call_of(problem)
    if seq_lens is not None:
        check_seq_lens_values(seq_lens, problem.q_len)
    try:
        result = call.run(q, k, v, problem, **masks)
    except THROUGH:
        raise
    except Exception as error:
        raise call.failed(error) from error
    return call.with_lse(result) if return_lse else (call.parts(result)[0], None)  # some return it unasked


def _call_of(problem: Problem) -> Call:
    with decide.lock:
        known = _calls.get(problem)
        if known is None:
            observers.notify(problem)
        amid = tracing.amid()
        decision = decide.traced(problem) if amid else decide.decide(problem)
        if known is not None and known[0] is decision:
            return known[1]
        call = Call(run_of(problem, decision, amid), problem, titled(*decision.chosen))
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls[problem] = decision, call
    return call
