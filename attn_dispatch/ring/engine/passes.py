"""One rank's forward and backward pass over a sequence that lies on many.

Forward: rows of k and v arrive from the others while those that are there are worked on; partial results are joined by
lse in float32. Backward: the same rows arrive again, each part's own backward is given the out and lse of the whole,
and gradients of k and v travel home to where the rows came from, where they are added up in the order of steps.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers; rows that no query sees stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.numerics import merge_, sum_dtype
from attn_dispatch.ring.engine.exchange import Flight, Sizes, Wire, add_home, message_size, pack, unpack
from attn_dispatch.ring.engine.parts import Part
from attn_dispatch.ring.engine.steps import GRAD_SLOTS, Step, buffer_rows, own_work, row_slots
from attn_dispatch.ring.rows.traffic import Rows
from attn_dispatch.spec.problem import Problem


@dataclass(slots=True)
class RingCall:
    """A problem over many ranks; forward and backward as `recorded` wants them.

    Args:
        problem: the whole sequence's, its scale above 0.
        seen: bool [batch, tokens of the whole sequence], what masks leave; None: everything.
        padding: bool [batch, tokens of this rank], queries that are none; None: none.
        vote: told at the end of a pass what failed here, or None; raises if anything failed anywhere, since gradients
            of this rank's keys come from the others too. Not asked where no gradients are needed.
    """

    problem: Problem
    steps: tuple[Step, ...]
    wire: Wire
    seen: Tensor | None = None
    padding: Tensor | None = None
    vote: Callable[[Exception | None], None] | None = None

    def reserve(self) -> None:
        """Take the memory for what is sent and received."""
        for slot, rows in buffer_rows(step.counts for step in self.steps[1:]).items():
            if self.problem.needs_grad or slot not in GRAD_SLOTS:
                self._buffer(slot, message_size(rows, self.problem))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, trouble = Sums(q), _Trouble()
        flight = None
        for number, (step, own) in enumerate(zip(self.steps, own_work(self.steps, backward=False))):
            rows = self._arrived(step, flight)
            flight = self._start(number + 1, k, v)
            if not trouble:
                with trouble:
                    if number:
                        self._forward_step(step, q, rows, sums)
                    self._forward_step(own, q, [(k, v)], sums)
            del rows
        if self.problem.needs_grad:
            self._vote(trouble)  # a rank that fails now would be waited for in the backward pass
        trouble.raised()
        out, lse = sums.results()
        if self.padding is not None:
            out = out.masked_fill(self.padding[:, :, None, None], 0.0)
            lse = lse.masked_fill(self.padding[:, None], -math.inf)
        return out, lse.contiguous()

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        grad = torch.zeros_like(out) if grad is None else grad
        # A query without keys, or one that is padding, weighs nothing: exp(s - inf) is 0.
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        q_side = grad, None if grad_lse is None else grad_lse.transpose(1, 2), q, out, lse.transpose(1, 2)
        wide = sum_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        own = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        trouble = _Trouble()
        flight = homeward = None
        for number, (step, mine) in enumerate(zip(self.steps, own_work(self.steps, backward=True))):
            rows = self._arrived(step, flight)
            flight = self._start(number + 1, k, v)
            if number:
                grads: list[tuple[Tensor, ...]] = []
                if not trouble:
                    with trouble:
                        grads = [_zeros_like(pair, wide) for pair in rows]
                        self._backward_step(step, q_side, rows, dq, grads)
                self._land(self.steps[number - 1], homeward, own)
                homeward = self._start_home(step, [] if trouble else grads)
                del grads
            del rows
            if not trouble:
                with trouble:
                    self._backward_step(mine, q_side, [(k, v)], dq, [own])
        self._land(self.steps[-1], homeward, own)
        self._vote(trouble)
        trouble.raised()
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)

    def _vote(self, trouble: _Trouble) -> None:
        if self.vote is not None and len(self.steps) > 1:
            self.vote(trouble.error)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _forward_step(self, step: Step, q: Tensor, rows: Sequence[tuple[Tensor, Tensor]], sums: Sums) -> None:
        masks = self._masks(step)
        for part in step.parts:
            keys, values = (part.keys_of(x) for x in rows[part.source])
            sums.add(part, *part.call(masks[part.source]).forward(part.of(q), keys, values))

    def _backward_step(
        self,
        step: Step,
        q_side: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
        rows: Sequence[tuple[Tensor, Tensor]],
        dq: Tensor,
        grads: Sequence[tuple[Tensor, ...]],
    ) -> None:
        masks = self._masks(step)
        for part in step.parts:
            g, slope, q, out, lse = (None if x is None else part.of(x) for x in q_side)
            assert q is not None
            assert out is not None
            assert lse is not None
            keys, values = (part.keys_of(x) for x in rows[part.source])
            slope = None if slope is None else slope.transpose(1, 2)
            saved = q, keys, values, out, lse.transpose(1, 2)
            found = part.call(masks[part.source]).backward(g, slope, saved)
            add_rows(dq, part, found[0])
            for total, one in zip(grads[part.source], found[1:]):
                part.add_keys(total, one)

    def _masks(self, step: Step) -> list[Tensor | None]:
        seen = self.seen
        if seen is None:
            return [None] * len(step.sources)
        return [seen.index_select(1, source.positions.to(seen.device)) for source in step.sources]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _start(self, number: int, k: Tensor, v: Tensor) -> Flight | None:
        """Set a step's rows on their way."""
        if number >= len(self.steps):
            return None
        step = self.steps[number]
        into, out = row_slots(number)
        receives, sends = self._buffers(into, step.receives), self._buffers(out, step.sends)
        for peer, rows in step.sends.items():
            pack(k, v, rows, sends[peer])
        return self.wire.exchange(sends, receives)

    def _buffers(self, slot: int, rows: dict[int, tuple[Rows, ...]]) -> dict[int, Tensor]:
        """A flat tensor for the rows, or the gradients of rows, of each peer."""
        sizes = [message_size(sum(each.count for each in several), self.problem) for several in rows.values()]
        return dict(zip(rows, torch.split(self._buffer(slot, sum(sizes)), sizes))) if rows else {}

    def _buffer(self, slot: int, size: int) -> Tensor:
        dtype = sum_dtype(self.problem.dtype) if slot in GRAD_SLOTS else self.problem.dtype
        return self.wire.buffer(slot, size, dtype, self.problem.device)

    def _arrived(self, step: Step, flight: Flight | None) -> list[tuple[Tensor, Tensor]]:
        """k and v of each source of a step; none where nothing is under way."""
        if flight is None:
            return []
        flight.wait()
        by_heads: dict[range, list[tuple[Tensor, Tensor]]] = {}
        for peer, rows in step.receives.items():
            views = unpack(flight.receives[peer], rows, self.problem.batch, self.problem.head_dim)
            for each, pair in zip(rows, views):
                by_heads.setdefault(each.heads, []).append(pair)
        return [_joined(pairs) for pairs in by_heads.values()]

    def _start_home(self, step: Step, grads: Sequence[tuple[Tensor, ...]]) -> Flight:
        """Set gradients of a step's rows on their way to where the rows came from; NaN after a failure, so that nobody
        takes them for gradients.
        """
        size = self.problem.batch, self.problem.head_dim
        into, out = GRAD_SLOTS
        receives, sends = self._buffers(into, step.sends), self._buffers(out, step.receives)
        taken = dict.fromkeys((source.heads for source in step.sources), 0)
        totals = dict(zip(taken, grads))
        for peer, rows in step.receives.items():
            if not grads:
                sends[peer].fill_(math.nan)
                continue
            for each, views in zip(rows, unpack(sends[peer], rows, *size)):
                start = taken[each.heads]
                taken[each.heads] += len(each.positions)
                for view, total in zip(views, totals[each.heads]):
                    view.copy_(total[:, start : taken[each.heads]])
        return self.wire.exchange(sends, receives)

    def _land(self, step: Step, flight: Flight | None, own: tuple[Tensor, ...]) -> None:
        """Add up gradients that have come home."""
        if flight is not None:
            flight.wait()
            for peer, rows in step.sends.items():
                add_home(own, flight.receives[peer], rows)


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows of several peers as one tensor."""
    if len(pairs) == 1:
        return pairs[0]
    keys, values = (torch.cat(each, dim=1) for each in zip(*pairs))
    return keys, values


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartSize:
    """The size of a part.

    Args:
        queries, keys: its rows and heads of q and of k, as shares of the rank's.
        workspace: bytes that the backend allocates.
    """

    queries: float
    keys: float
    workspace: int


def forward_peak(rank: Sizes, own: Sequence[PartSize], far: Sequence[PartSize]) -> int:
    """Most bytes that `RingCall.forward` allocates at once, buffers aside.

    Args:
        own, far: the parts on the rank's own rows, and on rows of other ranks.
    """
    widened = rank.q * rank.wider if rank.wider > 1 else 0
    out = rank.q + widened  # of a part, and its copy in the dtype of sums
    sums = rank.q * rank.wider + rank.lse
    first = max(int((out + 2 * rank.lse) * part.queries) + part.workspace for part in own)
    if len(own) > 1 or own[0].queries < 1:
        first += sums  # allocated for the first of several parts
    later = sums + max((int((out + 3 * rank.lse) * part.queries) + part.workspace for part in far), default=0)
    results = sums + rank.lse + (rank.q if widened else 0)
    return max(first, later, results)


def backward_peak(rank: Sizes, own: Sequence[PartSize], far: Sequence[PartSize], grads: int) -> int:
    """Most bytes that `RingCall.backward` allocates at once or was given besides q, k and v, buffers aside.

    Args:
        own, far: as for `forward_peak`.
        grads: bytes of the gradients of the rows that one step received.
    """
    given = 2 * rank.q + 2 * rank.lse  # out and its gradient; lse, and its copy without -inf
    sums = (rank.q + rank.kv) * rank.wider
    first, later = (
        max((int(rank.q * part.queries + rank.kv * part.keys) + part.workspace for part in parts), default=0)
        for parts in (own, far)
    )
    results = rank.q + rank.kv if rank.wider > 1 else 0
    return given + sums + max(first, grads + later, results)


class _Trouble:
    """A rank that fails goes on sending and receiving, so that nobody waits for it in vain, and says so afterwards."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.error = self.error or error
            return True
        return False

    def __bool__(self) -> bool:
        return self.error is not None

    def raised(self) -> None:
        if self.error is not None:
            raise self.error


def _zeros_like(pair: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in pair)


class Sums:
    """out [batch, tokens, heads, head_dim] and lse [batch, tokens, heads] over the keys met so far."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, part: Part, out: Tensor, lse: Tensor) -> None:
        """Join what a part of the keys gave; lse is [batch, heads, tokens]."""
        wide = sum_dtype(self.q.dtype)
        out, lse = out.to(wide), lse.transpose(1, 2)
        if self.out is None or self.lse is None:
            if isinstance(part.rows, slice) and out.shape == self.q.shape:
                self.out, self.lse = out, lse.contiguous()
                return
            self.out = torch.zeros(self.q.shape, dtype=wide, device=self.q.device)
            self.lse = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
        mine, stats = part.of(self.out), part.of(self.lse)
        merge_(mine, stats, out, lse)
        if isinstance(part.rows, Tensor):
            self.out[:, :, part.heads].index_copy_(1, part.rows, mine)
            self.lse[:, :, part.heads].index_copy_(1, part.rows, stats)

    def results(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, and lse [batch, heads, tokens]; zeros and -inf where nothing was met."""
        if self.out is None or self.lse is None:
            wide = sum_dtype(self.q.dtype)
            none = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
            return torch.zeros_like(self.q), none.transpose(1, 2)
        return self.out.to(self.q.dtype), self.lse.transpose(1, 2)


def add_rows(total: Tensor, part: Part, grad: Tensor) -> None:
    """Add a part's gradient to its rows and heads of `total` [batch, tokens, heads, head_dim]."""
    mine = total[:, :, part.heads]
    if isinstance(part.rows, Tensor):
        mine.index_add_(1, part.rows, grad.to(total.dtype))
    else:
        mine[:, part.rows] += grad
