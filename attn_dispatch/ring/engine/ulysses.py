"""All-to-all exchange: every rank gets the whole sequence for some heads, attends alone, and sends the results back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch.ring.engine.exchange import Sizes, Transport, current_device, lost
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import put_tokens, tokens_of
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem


def refusal(problem: Problem, ranks: int) -> str:
    """The reason why the heads cannot be split over `ranks` ranks; "" if they can."""
    if problem.heads % ranks or problem.kv_heads % ranks:
        return f"{problem.heads} heads and {problem.kv_heads} key heads do not come out even over {ranks} ranks"
    pattern, each = problem.pattern.natural, problem.heads // ranks
    if isinstance(pattern, Dilated) and pattern.heads == "split":
        return "heads of different branches are different problems"
    if isinstance(pattern, Dilated):
        rates = [rate for rate in pattern.dilation_rates if each % rate or (rate > 1 and pattern.offsets == "block")]
        if rates:
            return f"{each} heads of each rank would begin at other offsets of dilation rate {rates[0]}"
    return ""


def peak(rank: Sizes, heads: Sizes, workspace: int, needs_grad: bool) -> int:
    """Most bytes that a call allocates at once.

    Args:
        rank: of the rank's tokens, all heads. heads: of all tokens, the rank's heads.
        workspace: of the backend that solves the heads.
    """
    q, kv, lse = heads.q, heads.kv, heads.lse
    # For each tensor: the rows to send and the rows received, then the latter in the order of tokens.
    gathered = max(q + max(q, rank.q), q + kv // 2 + kv // 2 + max(kv, rank.kv) // 2)
    solved = q + kv + q + 2 * lse + workspace
    returned = (q + kv if needs_grad else 0) + q + max(q + rank.q, 2 * rank.q) + lse
    forward = max(gathered, solved, returned)
    if not needs_grad:
        return forward
    # Saved: q, k, v, out and lse of the heads. Then out, its gradient, and the gradients of q, k and v.
    saved = q + kv + q + 2 * lse + 2 * rank.q
    sent_back = 2 * rank.q + q + kv + 3 * q + rank.q  # the saved tensors have been dropped by then
    return max(forward, saved + 3 * q, saved + q + q + kv + workspace, sent_back)


def to_heads(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    """From [batch, this rank's tokens, heads, ...] to [batch, all tokens, this rank's heads, ...]; a collective."""
    found: Tensor = _AllToAll.apply(x, transport, layout, True)  # type: ignore[no-untyped-call]
    return found


def to_tokens(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    """From [batch, all tokens, this rank's heads, ...] to [batch, this rank's tokens, heads, ...]; a collective."""
    found: Tensor = _AllToAll.apply(x, transport, layout, False)  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    """Gathers tokens or scatters them; the backward pass does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport, layout: Layout, gathers: bool) -> Tensor:
        ctx.how = transport, layout, gathers
        return (_gather if gathers else _scatter)(x, transport, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        transport, layout, gathers = ctx.how
        back = _AllToAll.apply(grads[0], transport, layout, not gathers)  # type: ignore[no-untyped-call]
        return back, None, None, None


def _gather(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    ranks, (batch, _, heads), rest = layout.ranks, x.shape[:3], x.shape[3:]
    each = heads // ranks
    sent = torch.unflatten(x, 2, (ranks, each)).movedim(2, 0).contiguous()
    received = x.new_empty(batch * layout.tokens * each * rest.numel())
    sizes = [batch * length * each * rest.numel() for length in layout.lengths]
    _all_to_all(received, sent.view(-1), sizes, [sent[0].numel()] * ranks, transport)
    del sent
    whole = x.new_empty(batch, layout.tokens, each, *rest)
    for rank, part in enumerate(torch.split(received, sizes)):
        put_tokens(whole, part.view(batch, layout.lengths[rank], each, *rest), layout, rank)
    return whole


def _scatter(x: Tensor, transport: Transport, layout: Layout) -> Tensor:
    ranks, (batch, _, each), rest = layout.ranks, x.shape[:3], x.shape[3:]
    sizes = [batch * length * each * rest.numel() for length in layout.lengths]
    sent = x.new_empty(sum(sizes))
    for rank, part in enumerate(torch.split(sent, sizes)):
        part.view(batch, layout.lengths[rank], each, *rest).copy_(tokens_of(x, layout, rank))
    length = layout.lengths[dist.get_rank(transport.group)]
    size = batch * length * each * rest.numel()
    received = x.new_empty(ranks * size)
    _all_to_all(received, sent, [size] * ranks, sizes, transport)
    del sent
    return received.view(ranks, batch, length, each, *rest).movedim(0, 2).flatten(2, 3).contiguous()


def _all_to_all(received: Tensor, sent: Tensor, receives: list[int], sends: list[int], transport: Transport) -> None:
    rank = dist.get_rank(transport.group)
    transport.bytes_sent += (sum(sends) - sends[rank]) * sent.itemsize
    try:
        with current_device(sent.device):
            dist.all_to_all_single(received, sent, receives, sends, group=transport.group)
    except RuntimeError as error:
        raise lost(error) from error
