"""Predicts memory, bytes sent and time of a call over many ranks, for each exchange of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch.kernels.hidden import may_hide
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles.estimates import call_bytes
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.parts import TILE, solver
from attn_dispatch.ring.engine.steps import GRAD_SLOTS, buffer_rows, transfers
from attn_dispatch.ring.plan.counts import CountedProblem
from attn_dispatch.ring.plan.schedule import RankSpeed, seconds
from attn_dispatch.ring.rows.chunking import block_rows, line_of
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.orders import EXCHANGES, LOCAL, ULYSSES
from attn_dispatch.spec.pattern import Dense, Neighborhood
from attn_dispatch.spec.problem import CONTIGUOUS, Problem

LISTED = 64  #: most bytes of what is listed of a row: positions, indices, bounds in tables


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The memory of one rank.

    Args:
        input_bytes: q, k and v.
        buffer_bytes: buffers for messages, reused by the next call.
        peak_bytes: a bound of the largest sum at any time, these included.
    """

    input_bytes: int
    buffer_bytes: int
    peak_bytes: int


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
    counted = CountedProblem.of(replace(problem, ranks=layout.ranks), layout)
    return [_forecast(counted, exchange, speed) for exchange in EXCHANGES]


def refusal(counted: CountedProblem, exchange: str) -> str:
    """The reason why an exchange cannot serve; "" if it can."""
    most = max(map(counted.counts.received, range(counted.layout.ranks)))
    if exchange == LOCAL:
        return f"a rank sees {most} key rows of other ranks" if most else ""
    if not most:
        return "no rank sees another's rows: there is nothing to exchange"
    return ulysses.refusal(counted.problem, counted.layout.ranks) if exchange == ULYSSES else ""


def _forecast(counted: CountedProblem, exchange: str, speed: RankSpeed | None) -> Forecast:
    reason = refusal(counted, exchange)
    if reason:
        return Forecast(exchange, reason)
    ranks = range(counted.layout.ranks)
    try:
        memory = [peak_memory_of(counted, exchange, rank) for rank in ranks]
    except LookupError as error:  # no backend supports a part
        return Forecast(exchange, str(error))
    forward, shipped = zip(*((sent[0], sum(sent)) for rank in ranks if (sent := counted.bytes_sent(rank, exchange))))
    return Forecast(
        exchange=exchange,
        reason="",
        memory=max(memory, key=lambda each: each.peak_bytes),
        forward_bytes=max(forward),
        forward_total_bytes=sum(forward),
        shipped_bytes=max(shipped),
        shipped_total_bytes=sum(shipped),
        seconds=None if speed is None else seconds(counted, exchange, speed),
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_memory_of(counted: CountedProblem, exchange: str, rank: int) -> PeakMemory:
    """A bound of the memory of one rank's call; of a single rank, that of the backend on one device."""
    problem, layout, rows = counted.problem, counted.layout, counted.counts.rows
    tokens, grads = layout.lengths[rank], problem.needs_grad
    q, kv, lse = counted.sizes(tokens)
    if layout.ranks == 1:
        results = problem.result_bytes + (q if grads else 0)  # and the gradient of out
        return PeakMemory(q + kv, 0, q + kv + results + int(solver(problem).workspace_bytes(problem)))
    wider = sum_dtype(problem.dtype).itemsize // problem.dtype.itemsize
    # Copies with zeros in hidden rows.
    hidden = kv * (problem.masked or may_hide(problem)) + q * problem.has_seq_lens * (1 + grads)
    if exchange == ULYSSES:  # of this rank's tokens, and of all tokens of its heads; of the latter also sums
        heads = replace(ulysses.share_of(problem, layout.ranks), return_lse=True, ranks=1)
        alive = 2 * (q + kv) + 2 * q * wider + 4 * lse + (2 * (q + kv) * wider + 2 * q) * grads
        alive += hidden + LISTED * layout.tokens + int(solver(heads).workspace_bytes(heads))
        return PeakMemory(q + kv, 0, alive)
    steps, gathered = [], 0
    for each in transfers(problem, layout, exchange):
        # Pieces of the mean length, rounded up; `Rows.piece` may have more.
        received = sum(-(-rows[rank][peer] // each.pieces) for peer in each.senders(rank))
        sent = sum(-(-rows[peer][rank] // each.pieces) for peer in each.receivers(rank))
        steps += [(received, sent)] * each.pieces
        gathered = received if len(each.distances) > 1 else gathered  # rows of several ranks are concatenated
    slots, most = buffer_rows(steps), max((received for received, _ in steps), default=0)
    buffers = sum(count for slot, count in slots.items() if slot not in GRAD_SLOTS) * counted.row_bytes
    if grads:
        buffers += sum(slots[slot] for slot in GRAD_SLOTS) * counted.grad_row_bytes
    share, part = _largest_part(counted, tokens, -(-most // problem.kv_heads))
    alive = q * wider + lse + part  # sums, and next the results of a part
    alive += int((q + q * wider * (wider > 1) + 3 * lse) * share)
    if grads:
        given, sums = 2 * q + 2 * lse, (q + kv) * wider  # out, lse and what they become; dq, dk and dv
        # A window's block has the keys beside it, too.
        results = int(q * share + kv * min(1.0, 2 * share)) + most * counted.grad_row_bytes
        alive = max(alive, given + sums + part + results)
    listed = LISTED * (tokens + sum(received + sent for received, sent in steps))
    return PeakMemory(q + kv, buffers, q + kv + buffers + gathered * counted.row_bytes + alive + hidden + listed)


def _largest_part(counted: CountedProblem, tokens: int, received: int) -> tuple[float, int]:
    """Its rows, as a share of the rank's, and its workspace.

    Args:
        received: rows of each key head in a step.
    """
    problem, layout = counted.problem, counted.layout
    part = replace(problem, return_lse=True, ranks=1, strides=CONTIGUOUS)
    if line_of(problem.pattern, layout.tokens) is not None:
        rows = min(tokens, block_rows(problem, layout))
        part = replace(part, pattern=Dense(), q_len=rows, k_len=rows)
        return rows / tokens, int(solver(part).workspace_bytes(part))
    keys = seen = max(tokens, received)
    if isinstance(problem.pattern, Neighborhood):  # a tile sees only keys near it
        seen, stride = TILE, 1
        for axis in reversed(problem.pattern.axes):
            seen += (axis.window + axis.stride - 2) * axis.dilation * stride
            stride *= axis.size
    return 1.0, call_bytes(replace(part, q_len=tokens, k_len=keys), TILE, min(seen, keys))
