"""What a call over many ranks would take: memory, bytes shipped and time, for each way of exchanging rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch.ring.engine.exchange import Sizes
from attn_dispatch.ring.engine.parts import solver
from attn_dispatch.ring.plan.bytes_sent import Load, freight_of, why_not
from attn_dispatch.ring.plan.counts import counts_of
from attn_dispatch.ring.plan.footprint import Footprint, footprint_of
from attn_dispatch.ring.plan.schedule import Pace, seconds
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.orders import EXCHANGES
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one exchange: bytes of the worst rank and of all, forward and with backward where gradients are needed.

    `seconds` is None where no pace is known; everything else is None where the exchange cannot serve: `reason`.
    """

    exchange: str
    reason: str
    memory: Footprint | None = None
    forward_bytes: int | None = None
    forward_total_bytes: int | None = None
    shipped_bytes: int | None = None
    shipped_total_bytes: int | None = None
    seconds: float | None = None


def forecasts_over(problem: Problem, layout: Layout, pace: Pace | None) -> list[Forecast]:
    """For every exchange.

    Args:
        problem: the whole sequence's.

    Raises:
        InvalidInput: the problem cannot be counted.
    """
    problem = replace(problem, ranks=layout.ranks)
    load = Load(problem, layout, counts_of(problem.pattern, layout, problem.heads, problem.kv_heads))
    return [_forecast(load, exchange, pace) for exchange in EXCHANGES]


def _forecast(load: Load, exchange: str, pace: Pace | None) -> Forecast:
    reason = why_not(load, exchange)
    if reason:
        return Forecast(exchange, reason)
    freight = freight_of(load, exchange)
    ranks = range(load.layout.ranks)
    try:
        memory = [footprint_of(load, exchange, rank) for rank in ranks] if len(ranks) > 1 else [_alone(load)]
    except LookupError as error:  # nobody solves a part of it
        return Forecast(exchange, str(error))
    return Forecast(
        exchange=exchange,
        reason="",
        memory=max(memory, key=lambda each: each.peak_bytes),
        forward_bytes=max(each.forward for each in freight),
        forward_total_bytes=sum(each.forward for each in freight),
        shipped_bytes=max(each.total for each in freight),
        shipped_total_bytes=sum(each.total for each in freight),
        seconds=None if pace is None else seconds(load, exchange, pace),
    )


def _alone(load: Load) -> Footprint:
    """Of a single rank, whose call is that of one device: results and a backend's own share, by what it says itself."""
    problem = load.problem
    sizes = Sizes.of(problem, problem.q_len)
    inputs = sizes.q + sizes.kv
    results = problem.result_bytes + (sizes.q if problem.needs_grad else 0)  # and the gradient of out
    return Footprint(inputs, 0, 0, inputs + results + int(solver(problem).workspace_bytes(problem)), 0)
