"""One rank's forward and backward pass over a sequence that is sharded over many ranks.

Forward: rows of k and v are received from other ranks while the kernels compute on the rows of the step before; partial
results are merged by their lse, in float32. Backward: the same rows are received again, each part's backward gets the
out and lse over all keys, and gradients of k and v are sent back to the rows' owner, which adds them in step order.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers; rows that no query sees are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.kernels.numerics import merge_, sum_dtype
from attn_dispatch.ring.engine.exchange import PendingExchange, Transport, add_returned, message_size, pack, unpack
from attn_dispatch.ring.engine.parts import Part
from attn_dispatch.ring.engine.steps import GRAD_SLOTS, Step, buffer_rows, own_work, row_slots
from attn_dispatch.ring.rows.traffic import Rows
from attn_dispatch.spec.problem import Problem


@dataclass(slots=True)
class RingCall:
    """A problem over many ranks; the `Passes` of `kernels.autograd`.

    Args:
        problem: the whole sequence's; its scale is above 0.
        seen: bool [batch, tokens of the whole sequence], the keys that masks leave visible; None: all.
        padding: bool [batch, tokens of this rank], the queries that are padding; None: none.
        raise_if_any_failed: called at the end of a pass with this rank's error, or None; raises if any rank has an
            error, since other ranks compute gradients of this rank's keys. Called only if gradients are needed, or
            where there is one step: then other ranks need its results. None: no other rank needs anything.
    """

    problem: Problem
    steps: tuple[Step, ...]
    transport: Transport
    seen: Tensor | None = None
    padding: Tensor | None = None
    raise_if_any_failed: Callable[[Exception | None], None] | None = None

    def reserve(self) -> None:
        """Allocate the buffers for sent and received rows and gradients."""
        for slot, rows in buffer_rows(step.counts for step in self.steps[1:]).items():
            if self.problem.needs_grad or slot not in GRAD_SLOTS:
                self._buffer(slot, message_size(rows, self.problem))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, failures = Sums(q), list[Exception]()
        pending = None
        for number, (step, own_step) in enumerate(zip(self.steps, own_work(self.steps, backward=False))):
            rows = self._received(step, pending)
            pending = self._start_rows(number + 1, k, v)
            if not failures:
                with _kept(failures):
                    if number:
                        self._forward_step(step, q, rows, sums)
                    self._forward_step(own_step, q, [(k, v)], sums)
            del rows
        # In the backward pass the other ranks would wait for a rank that failed here.
        self._raise(failures, everywhere=self.problem.needs_grad or len(self.steps) == 1)
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
        # A query without keys, or a padding query, gets no probability: exp(s - inf) is 0.
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        q_side = grad, None if grad_lse is None else grad_lse.transpose(1, 2), q, out, lse.transpose(1, 2)
        wide = sum_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        own = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        failures: list[Exception] = []
        pending = returning = None
        for number, (step, own_step) in enumerate(zip(self.steps, own_work(self.steps, backward=True))):
            rows = self._received(step, pending)
            pending = self._start_rows(number + 1, k, v)
            if number:
                grads: list[tuple[Tensor, ...]] = []
                if not failures:
                    with _kept(failures):
                        grads = [_zeros_like(pair, wide) for pair in rows]
                        self._backward_step(step, q_side, rows, dq, grads)
                self._add_returned(self.steps[number - 1], returning, own)
                returning = self._start_grads(step, [] if failures else grads)
                del grads
            del rows
            if not failures:
                with _kept(failures):
                    self._backward_step(own_step, q_side, [(k, v)], dq, [own])
        self._add_returned(self.steps[-1], returning, own)
        self._raise(failures, everywhere=True)
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)

    def _raise(self, failures: list[Exception], everywhere: bool) -> None:
        """Raise this rank's error, if any; `everywhere`: on all ranks, if any has one."""
        if everywhere and self.raise_if_any_failed is not None:
            self.raise_if_any_failed(failures[0] if failures else None)
        if failures:
            raise failures[0]

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
            g, q, out, lse = (part.of(x) for x in (q_side[0], *q_side[2:]))
            keys, values = (part.keys_of(x) for x in rows[part.source])
            g_lse = None if q_side[1] is None else part.of(q_side[1]).transpose(1, 2)
            saved = q, keys, values, out, lse.transpose(1, 2)
            found = part.call(masks[part.source]).backward(g, g_lse, saved)
            add_rows(dq, part, found[0])
            for total, grad in zip(grads[part.source], found[1:]):
                part.add_keys(total, grad)

    def _masks(self, step: Step) -> list[Tensor | None]:
        seen = self.seen
        if seen is None:
            return [None] * len(step.sources)
        at = [source.positions if source.on_device is None else source.on_device for source in step.sources]
        return [seen.index_select(1, positions) for positions in at]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _start_rows(self, number: int, k: Tensor, v: Tensor) -> PendingExchange | None:
        """Start to send and receive the rows of a step."""
        if number >= len(self.steps):
            return None
        step = self.steps[number]
        into, out = row_slots(number)
        receives, sends = self._buffers(into, step.receives), self._buffers(out, step.sends)
        for peer, rows in step.sends.items():
            pack(k, v, rows, sends[peer])
        return self.transport.exchange(sends, receives)

    def _buffers(self, slot: int, rows: dict[int, tuple[Rows, ...]]) -> dict[int, Tensor]:
        """A flat tensor for the rows, or the gradients of rows, of each peer."""
        sizes = [message_size(sum(each.count for each in several), self.problem) for several in rows.values()]
        return dict(zip(rows, torch.split(self._buffer(slot, sum(sizes)), sizes))) if rows else {}

    def _buffer(self, slot: int, size: int) -> Tensor:
        dtype = sum_dtype(self.problem.dtype) if slot in GRAD_SLOTS else self.problem.dtype
        return self.transport.buffer(slot, size, dtype, self.problem.device)

    def _received(self, step: Step, pending: PendingExchange | None) -> list[tuple[Tensor, Tensor]]:
        """Wait for a step's rows: k and v of each of its sources; empty if it receives none."""
        if pending is None:
            return []
        pending.wait()
        by_heads: dict[range, list[tuple[Tensor, Tensor]]] = {}
        for peer, rows in step.receives.items():
            views = unpack(pending.receives[peer], rows, self.problem.batch, self.problem.head_dim)
            for each, pair in zip(rows, views):
                by_heads.setdefault(each.heads, []).append(pair)
        return [_joined(pairs) for pairs in by_heads.values()]

    def _start_grads(self, step: Step, grads: Sequence[tuple[Tensor, ...]]) -> PendingExchange:
        """Start to send gradients of a step's rows back to their owners; NaN after a failure, so that they cannot pass
        for gradients.
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
        return self.transport.exchange(sends, receives)

    def _add_returned(self, step: Step, pending: PendingExchange | None, own: tuple[Tensor, ...]) -> None:
        """Wait for the gradients of rows that this rank sent in a step, and add them to dk and dv."""
        if pending is not None:
            pending.wait()
            for peer, rows in step.sends.items():
                add_returned(own, pending.receives[peer], rows)


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate rows of several peers."""
    if len(pairs) == 1:
        return pairs[0]
    keys, values = (torch.cat(each, dim=1) for each in zip(*pairs))
    return keys, values


@contextmanager
def _kept(failures: list[Exception]) -> Iterator[None]:
    """Keep a rank's error, to raise it after the pass: until then the other ranks need its messages."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised by `_raise`
        failures.append(error)


def _zeros_like(pair: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in pair)


class Sums:
    """out [batch, tokens, heads, head_dim] and lse [batch, tokens, heads] over the keys of all parts so far."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, part: Part, out: Tensor, lse: Tensor) -> None:
        """Merge the results of a part; lse is [batch, heads, tokens]."""
        wide = sum_dtype(self.q.dtype)
        out, lse = out.to(wide), lse.transpose(1, 2)
        if self.out is None or self.lse is None:
            if isinstance(part.rows, slice) and out.shape == self.q.shape:
                self.out, self.lse = out, lse.contiguous()
                return
            self.out = torch.zeros(self.q.shape, dtype=wide, device=self.q.device)
            self.lse = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
        out_so_far, lse_so_far = part.of(self.out), part.of(self.lse)
        merge_(out_so_far, lse_so_far, out, lse)
        if isinstance(part.rows, Tensor):
            self.out[:, :, part.heads].index_copy_(1, part.rows, out_so_far)
            self.lse[:, :, part.heads].index_copy_(1, part.rows, lse_so_far)

    def results(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, and lse [batch, heads, tokens]; zeros and -inf without parts."""
        if self.out is None or self.lse is None:
            wide = sum_dtype(self.q.dtype)
            none = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
            return torch.zeros_like(self.q), none.transpose(1, 2)
        return self.out.to(self.q.dtype), self.lse.transpose(1, 2)


def add_rows(total: Tensor, part: Part, grad: Tensor) -> None:
    """Add a part's gradient to its rows and heads of `total` [batch, tokens, heads, head_dim]."""
    heads = total[:, :, part.heads]
    if isinstance(part.rows, Tensor):
        heads.index_add_(1, part.rows, grad.to(total.dtype))
    else:
        heads[:, part.rows] += grad
