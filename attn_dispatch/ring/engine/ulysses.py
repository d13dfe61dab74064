"""All-to-all over heads: each rank gets all tokens of some heads, attends alone, and sends the results back.

It sends less than `ring` where there are many ranks, in four messages, and each rank computes in one call.
`python -m tools.bench.ring exchanges` measures where it wins. Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch.machine.devices import current_device
from attn_dispatch.ring.engine.exchange import Transport, lost
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import tokens_of
from attn_dispatch.spec.problem import Problem


def refusal(problem: Problem, ranks: int) -> str:
    """The reason why the heads cannot be dealt to `ranks` ranks as equal problems; "" if they can."""
    if problem.heads % ranks or problem.kv_heads % ranks:
        return f"{problem.heads} heads and {problem.kv_heads} key heads do not come out even over {ranks} ranks"
    offsets, heads, each = problem.pattern.natural.head_offsets, problem.heads, problem.heads // ranks
    if any(offsets(head, heads) != offsets(head % each, each) for head in range(heads)):
        return f"{each} heads of each rank would begin at other offsets of the pattern"
    return ""


def share_of(problem: Problem, ranks: int) -> Problem:
    """The problem of a rank's heads."""
    return replace(problem, heads=problem.heads // ranks, kv_heads=problem.kv_heads // ranks)


def all_to_all(transport: Transport, layout: Layout, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """From [batch, this rank's tokens, heads, ...] to [batch, all tokens, this rank's heads, ...], or back; a
    collective. Gradients go the other way, of all tensors if of one.
    """
    found: tuple[Tensor, ...] = _AllToAll.apply(transport, layout, to_heads, *tensors)  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, layout: Layout, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.how = transport, layout, to_heads
        return tuple((_to_heads if to_heads else _to_tokens)(x, transport, layout) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        transport, layout, to_heads = ctx.how
        return None, None, None, *all_to_all(transport, layout, not to_heads, *grads)


def _to_heads(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    sent = torch.unflatten(x, 2, (layout.ranks, -1)).movedim((2, 1), (0, 1)).flatten(0, 1)
    rows = _exchanged(sent, [x.shape[1]] * layout.ranks, layout.lengths, transport)
    runs = [run for own in layout.chunks for run in own]
    by_start = sorted(zip(runs, torch.split(rows, list(map(len, runs)))), key=lambda pair: pair[0].start)
    return torch.cat([some for _, some in by_start]).transpose(0, 1)


def _to_tokens(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    sent = torch.cat([tokens_of(x, layout, rank) for rank in range(layout.ranks)], 1).transpose(0, 1)
    each = layout.lengths[dist.get_rank(transport.group)]
    rows = _exchanged(sent, layout.lengths, [each] * layout.ranks, transport)
    return torch.unflatten(rows, 0, (layout.ranks, -1)).movedim((0, 1), (2, 1)).flatten(2, 3)


def _exchanged(sent: Tensor, sends: Any, receives: Any, transport: Transport) -> Tensor:
    """The rows that all ranks send this one, in the order of ranks; `sends` and `receives` count rows for each rank."""
    sent, received = sent.contiguous(), sent.new_empty(sum(receives), *sent.shape[1:])
    others = len(sent) - sends[dist.get_rank(transport.group)]
    transport.bytes_sent += others * sent[0].numel() * sent.itemsize
    try:
        with current_device(sent.device):
            dist.all_to_all_single(received, sent, list(receives), list(sends), group=transport.group)
    except RuntimeError as error:
        raise lost(error) from error
    return received
