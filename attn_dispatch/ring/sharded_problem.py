"""One rank's attention call with one of the exchanges of rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.autograd import differentiable, result_known
from attn_dispatch.kernels.hidden import Hidden, hidden_by_masks, padding_mask
from attn_dispatch.kernels.numerics import with_positive_scale
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.ring.engine.steps import steps_of
from attn_dispatch.ring.link import Link, gathered
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import tokens_of, traffic_of
from attn_dispatch.spec.orders import EXCHANGES, GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Call, Problem
from attn_dispatch.text import one_line

Known = tuple[Tensor, Tensor] | None
NAME = "ring"  #: the backend whose orders are the exchanges


def local_problem(call: Call) -> Problem:
    """The problem of this rank's tokens alone, as a dense one.

    Raises:
        InvalidInput: no call over a mesh takes an argument.
    """
    for name in ("softcap", "bias", "alibi_slopes"):
        if getattr(call, name) is not None:
            raise InvalidInput(f"{name} cannot be given with mesh: over ranks scores are only scaled")
    for name in ("first_head", "all_heads"):
        if (got := getattr(call, name)) is not None:
            raise InvalidInput(f"over a mesh every rank holds all heads: {name} must be None, got {got!r}")
    problem = Problem.of_call(call.with_pattern(None, seq_lens=None))
    if problem.q_len != problem.k_len:
        raise InvalidInput(f"over a mesh q and k must have one length, got {problem.q_len} and {problem.k_len}")
    return problem


def equal_on_ranks(problem: Problem, pattern: Pattern, kind: str) -> dict[str, Any]:
    """What must be equal on every rank of its local problem, the whole pattern and the shards, in plain values."""
    plain = {**problem.to_dict(), "pattern": pattern.to_dict(), "shards": kind}
    return {name: x for name, x in plain.items() if name not in ("q_len", "k_len", "strides", "ranks")}


@dataclass(frozen=True, eq=False)
class ShardedProblem:
    """One rank's view of a problem that is sharded over many ranks.

    `problem` is that of the whole sequence, `held` its pattern with the tensors, where it has some.
    """

    problem: Problem
    layout: Layout
    link: Link
    held: Held | None = None

    def _exact(self, problem: Problem) -> Problem:
        """The problem with the tensors of its pattern."""
        return problem if self.held is None else replace(problem, pattern=self.held)

    def refusals(self) -> dict[str, str]:
        """Reasons why each exchange cannot run this problem, on this rank; "" where it can. Not a collective."""
        try:
            return self._refusals()
        except Exception as error:  # noqa: BLE001 - sent to the other ranks, which wait for it
            return dict.fromkeys(EXCHANGES, one_line(error))

    def _refusals(self) -> dict[str, str]:
        problem = self._exact(self.problem)
        if problem.dropout_p:
            return dict.fromkeys(EXCHANGES, f"has no dropout, asked for {problem.dropout_p:g}")
        found = {LOCAL: self.sees_others(self.link.rank), RING: "", GATHER: ""}
        found[ULYSSES] = ulysses.refusal(problem, self.layout.ranks)
        try:
            steps_of(problem, self.layout, self.link.rank, RING)
        except LookupError as error:
            found = dict.fromkeys(found, str(error))
        if problem.device.type not in self.link.devices:
            text = f"the process group cannot send {problem.device.type} tensors"
            found |= dict.fromkeys((RING, GATHER, ULYSSES), text)
        return found

    def sees_others(self, rank: int) -> str:
        """The number of other ranks' key rows that a rank's queries see, as text; "" if there are none."""
        problem = self._exact(self.problem)
        traffic = traffic_of(problem.pattern, self.layout, problem.heads, problem.kv_heads, rank, problem.device)
        rows = sum(each.count for rows in traffic.receives.values() for each in rows)
        return f"rank {rank} sees {rows} key rows of other ranks" if rows else ""

    def run(
        self,
        exchange: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_lens: Tensor | None = None,
        key_mask: Tensor | None = None,
        known: Known = None,
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse (None unless needed) of this rank's shard; a collective.

        Args:
            q, k, v: [batch, this rank's tokens, heads, head_dim].
            seq_lens: [batch], of the whole sequence. key_mask: [batch, this rank's tokens].
            known: out and lse, which are then not computed.

        Raises:
            RankLost: a rank has exited, or did not answer in time. Errors of kernels are raised as they are.
        """
        if exchange != LOCAL:
            self.link.connect(self.problem.device)
        mask = key_mask
        if mask is not None:
            mask = gathered(mask.to(torch.uint8), self.link, self.layout.chunks, 1, sums=False).bool()
        if exchange != ULYSSES:
            return self._run(exchange, q, k, v, seq_lens, mask, known)
        problem, how = self.problem, (self.link.transport, self.layout)
        share = ulysses.share_of(problem, self.layout.ranks)
        alone = replace(self, problem=share, layout=Layout((problem.q_len,)))
        q, k, v = ulysses.all_to_all(*how, True, q, k, v)
        if known is not None:
            whole, sums = ulysses.all_to_all(*how, True, known[0], known[1].transpose(1, 2))
            known = whole, sums.transpose(1, 2)
        out, lse = alone._run(exchange, q, k, v, seq_lens, mask, known)
        results = (out, lse.transpose(1, 2)) if problem.return_lse else (out,)
        out, *others = ulysses.all_to_all(*how, False, *results)
        return out, others[0].transpose(1, 2) if others else None

    def _run(
        self, exchange: str, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None, mask: Tensor | None, known: Known
    ) -> tuple[Tensor, Tensor]:
        """The same, with the mask of all tokens; of all tokens and no exchange where the layout has one rank."""
        q, problem = with_positive_scale(q, self.problem)
        ring = self._call(exchange, problem, seq_lens, mask)
        call = self._hidden(ring).around(ring)
        if problem.needs_grad:
            with nullcontext() if known is None else result_known(k, v, *known):
                return differentiable(q, k, v, call)
        with torch.no_grad():
            return call.forward(q, k, v)

    @property
    def _rank(self) -> int:
        """This rank's number in the layout."""
        return self.link.rank if self.layout.ranks > 1 else 0

    def reserve(self, exchange: str) -> None:
        """Allocate receive buffers before rows are sent: if that fails, no other rank waits for this one."""
        self._call(exchange, self.problem, None, None).reserve()

    def _call(self, exchange: str, problem: Problem, seq_lens: Tensor | None, mask: Tensor | None) -> RingCall:
        steps = steps_of(self._exact(problem), self.layout, self._rank, exchange if exchange != LOCAL else RING)
        hidden = hidden_by_masks(problem.k_len, seq_lens, mask)
        seen = None if hidden is None else ~hidden
        past = None if seq_lens is None else padding_mask(problem.k_len, seq_lens)
        padding = None if past is None else tokens_of(past, self.layout, self._rank)
        steps = steps[:1] if exchange == LOCAL else steps
        raise_if_any_failed = None if exchange == LOCAL else self.link.raise_if_any_failed
        return RingCall(problem, steps, self.link.transport, seen, padding, raise_if_any_failed)

    def _hidden(self, call: RingCall) -> Hidden:
        """This rank's hidden rows. They are zeroed before they are sent, so that no other rank has to hide them."""
        whole = Hidden.of(call.problem, {} if call.seen is None else {"key_mask": call.seen})
        hidden, problem = whole.keys, call.problem
        if self.held is not None:
            unseen = self.held.unseen(problem.k_len, problem.heads, problem.kv_heads)
            unseen = None if unseen is None else unseen.to(problem.device)
            hidden = unseen if hidden is None else hidden if unseen is None else hidden | unseen
        keys = None if hidden is None else tokens_of(hidden, self.layout, self._rank)
        return Hidden(keys, None if call.padding is None else call.padding[:, :, None, None])
