"""Predicts memory, bytes sent and time of a call over many ranks, for each exchange of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch.ring.engine.exchange import Sizes
from attn_dispatch.ring.engine.parts import solver
from attn_dispatch.ring.plan.bytes_sent import CountedProblem, bytes_sent_of, refusal
from attn_dispatch.ring.plan.peak_memory import PeakMemory, peak_memory_of
from attn_dispatch.ring.plan.schedule import RankSpeed, seconds
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.orders import EXCHANGES
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for one exchange.

    Args:
        reason: why the exchange cannot serve; then all else is None.
        memory: of the rank with the largest peak.
        forward_bytes, forward_total_bytes: bytes sent in the forward pass, by the rank that sends most and by all.
        shipped_bytes, shipped_total_bytes: the same for forward and, if gradients are needed, backward.
        seconds: None if no speed is given.
    """

    exchange: str
    reason: str
    memory: PeakMemory | None = None
    forward_bytes: int | None = None
    forward_total_bytes: int | None = None
    shipped_bytes: int | None = None
    shipped_total_bytes: int | None = None
    seconds: float | None = None


def forecasts_over(problem: Problem, layout: Layout, speed: RankSpeed | None) -> list[Forecast]:
    """A forecast for every exchange.

    Args:
        problem: the whole sequence's.
        speed: of each rank; None: no time is predicted.

    Raises:
        InvalidInput: the problem cannot be counted.
    """
    problem = replace(problem, ranks=layout.ranks)
    counted = CountedProblem.of(problem, layout)
    return [_forecast(counted, exchange, speed) for exchange in EXCHANGES]


def _forecast(counted: CountedProblem, exchange: str, speed: RankSpeed | None) -> Forecast:
    reason = refusal(counted, exchange)
    if reason:
        return Forecast(exchange, reason)
    sent = bytes_sent_of(counted, exchange)
    ranks = range(counted.layout.ranks)
    try:
        memory = [peak_memory_of(counted, exchange, rank) for rank in ranks] if len(ranks) > 1 else [_alone(counted)]
    except LookupError as error:  # no backend supports a part
        return Forecast(exchange, str(error))
    return Forecast(
        exchange=exchange,
        reason="",
        memory=max(memory, key=lambda each: each.peak_bytes),
        forward_bytes=max(each.forward for each in sent),
        forward_total_bytes=sum(each.forward for each in sent),
        shipped_bytes=max(each.total for each in sent),
        shipped_total_bytes=sum(each.total for each in sent),
        seconds=None if speed is None else seconds(counted, exchange, speed),
    )


def _alone(counted: CountedProblem) -> PeakMemory:
    """The memory of a single rank, as on one device: inputs, results, and the backend's `workspace_bytes`."""
    problem = counted.problem
    sizes = Sizes.of(problem, problem.q_len)
    inputs = sizes.q + sizes.kv
    results = problem.result_bytes + (sizes.q if problem.needs_grad else 0)  # and the gradient of out
    return PeakMemory(inputs, 0, 0, inputs + results + int(solver(problem).workspace_bytes(problem)), 0)
