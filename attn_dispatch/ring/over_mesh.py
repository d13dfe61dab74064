"""`attend` and `explain` over a mesh: what is asked is checked, agreed on, and run the way that all ranks decided."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.decisions import observers
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels.autograd import CHECKPOINT_STOP
from attn_dispatch.log import logger
from attn_dispatch.ring import group_decision
from attn_dispatch.ring.link import Agreed, Link, agree, digest_of
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.sharded_problem import Shared
from attn_dispatch.ring.trial import NAME
from attn_dispatch.settings import budget_ms, expected_calls, mode
from attn_dispatch.spec.orders import EXCHANGES, LOCAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem, check_seq_lens_values, choose_pattern
from attn_dispatch.store.decision import Decision

MOST_KEPT = 256  #: calls with their decisions

Known = tuple[Shared, Decision]


@dataclass(frozen=True, eq=False)
class Asked:
    """A call as this rank was asked it: its shard's problem, as if nothing else were seen, the pattern, and the choice
    that was forced.
    """

    local: Problem
    pattern: Pattern
    kind: str
    exchange: str | None
    seq_lens: Tensor | None
    settings: dict[str, Any]

    @cached_property
    def words(self) -> dict[str, Any]:
        """What must be the same on every rank, in plain values."""
        plain = self.local.to_dict()
        for own in ("q_len", "k_len", "strides", "ranks"):
            del plain[own]
        lens = self.seq_lens
        known = (
            None if lens is None or lens.device.type != "cpu" else lens.tolist()
        )  # others would have to be waited for
        about = {"shards": self.kind, "order": self.exchange, **self.settings, "torch": str(torch.__version__)}
        return {**plain, **about, "pattern": self.pattern.to_dict(), "seq_lens": known}

    @cached_property
    def key(self) -> Any:
        return digest_of(self.words), self.local.strides


def attend_over(link: Link, kind: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    """`attend` over a link's ranks, with shards of this kind. Arguments and results as there."""
    try:
        asked = _asked(q, k, v, kind, **arguments)
    except AttnDispatchError as error:
        agree(link, {}, 0, 0, error)  # tells the others, and raises
        raise
    shared, decision = _agreed(link, asked, (q, k, v), arguments)
    return _run(shared, decision, (q, k, v), arguments)


def explain_over(link: Link, kind: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """`explain` over a link's ranks: from what this rank knows, without asking the others. Where nothing was run yet,
    the other shards are taken to be as long as this one.
    """
    asked = _asked(q, k, v, kind, **arguments)
    found: Known | None = link.known.get(asked.key)
    if found is not None and found[0].layout.lengths[link.rank] == asked.local.q_len:
        return Explanation.of(found[1])
    lengths = (asked.local.q_len,) * link.size
    return Explanation.of(group_decision.explained(_shared(link, asked, lengths), asked.exchange))


def _asked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    *,
    pattern: Pattern | None = None,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    is_causal: bool = False,
    seq_lens: Tensor | None = None,
    backend: str | None = None,
    order: str | None = None,
    **rest: Any,
) -> Asked:
    """Check what can be checked without the other ranks.

    Raises:
        InvalidInput: an argument is wrong.
    """
    chosen = choose_pattern(pattern, segment_lengths, dilation_rates, is_causal)
    local = Problem.of(q, k, v, **rest)
    if local.q_len != local.k_len:
        raise InvalidInput(f"over a mesh q and k must have one length, got {local.q_len} and {local.k_len}")
    if backend not in (None, NAME):
        raise InvalidInput(f"backend must be None or {NAME!r} over a mesh, got {backend!r}")
    if order is not None and order not in EXCHANGES:
        raise InvalidInput(f"order must be None or one of {', '.join(map(repr, EXCHANGES))} over a mesh, got {order!r}")
    if seq_lens is not None and (not isinstance(seq_lens, Tensor) or seq_lens.dtype not in (torch.int32, torch.int64)):
        raise InvalidInput(f"seq_lens must be an int32 or int64 tensor, got {type(seq_lens).__name__}")
    if seq_lens is not None and (list(seq_lens.shape) != [local.batch] or seq_lens.device != q.device):
        raise InvalidInput(f"seq_lens must have shape [{local.batch}] on {q.device}, got {list(seq_lens.shape)}")
    return Asked(replace(local, has_seq_lens=seq_lens is not None), chosen, kind, order, seq_lens, _settings())


def alone(backend: str | None, order: str | None) -> tuple[str | None, str | None]:
    """The backend and the order that were forced, as they are for one device: a single rank has all rows.

    Raises:
        NoBackend: an exchange with others was.
    """
    if order in EXCHANGES and order != LOCAL:
        raise NoBackend(f"{order!r} cannot run over a single rank: {group_decision.NOTHING}")
    return None if backend == NAME else backend, None if order == LOCAL else order


def _settings() -> dict[str, Any]:
    """What environment variables say; in trials, which must end at the same time everywhere, of trials too.

    Raises:
        InvalidInput: one of them is wrong.
    """
    found = mode()
    trials = {"budget_ms": budget_ms(), "expected_calls": expected_calls()} if found == "tune" else {}
    return {"mode": found, **trials}


def _agreed(link: Link, asked: Asked, tensors: Any, arguments: Mapping[str, Any]) -> Known:
    """What all ranks go by: known from an earlier call, or decided on together now."""
    found: Known | None = link.known.get(asked.key)
    said: Agreed = agree(link, asked.words, asked.local.q_len, 0 if found is None else _number(*found))
    if found is not None and said.decided and said.lengths == found[0].layout.lengths:
        return found
    shared = _shared(link, asked, said.lengths)
    observers.notify(shared.problem)
    masks = {name: arguments[name] for name in ("seq_lens", "key_mask") if arguments.get(name) is not None}
    with torch.device("cpu"):  # not some default device of the caller's
        decision = group_decision.decide(shared, _inputs(shared, tensors, arguments), masks, asked.exchange)
    logger.info("%s: %s (%s)", shared.problem, decision.order, decision.source)
    link.known[asked.key] = shared, decision
    if len(link.known) > MOST_KEPT:
        link.known.popitem(last=False)
    return shared, decision


def _number(shared: Shared, decision: Decision) -> int:
    """One that is the same for the same decision about the same shards, on every rank; never 0."""
    text = f"{decision.order} {shared.layout} {decision.created if decision.source == 'measured' else decision.source}"
    return zlib.crc32(text.encode()) + 1


def _shared(link: Link, asked: Asked, lengths: tuple[int, ...]) -> Shared:
    """The whole sequence's problem.

    Raises:
        InvalidInput: the pattern or seq_lens do not fit it, on all ranks alike.
    """
    tokens = sum(lengths)
    if asked.seq_lens is not None:
        check_seq_lens_values(asked.seq_lens, tokens)
    problem = replace(
        asked.local,
        pattern=_fitting(asked.pattern, tokens, asked.local.heads),
        q_len=tokens,
        k_len=tokens,
        strides=("bnhd", "bnhd", "bnhd"),  # each rank's own; a decision for all goes by none
        ranks=link.size,
    )
    return Shared(problem, Layout(lengths, asked.kind), link)


@lru_cache(maxsize=256)
def _fitting(pattern: Pattern, tokens: int, heads: int) -> Pattern:
    pattern.check(tokens, tokens)
    return pattern.simplify(tokens, tokens, heads)


def _inputs(shared: Shared, tensors: tuple[Tensor, Tensor, Tensor], arguments: Mapping[str, Any]) -> Any:
    """q, k and v [batch, tokens, heads, head_dim], in the dtype that is computed in."""
    q, k, v = tensors
    if arguments.get("layout", "bnhd") == "bhnd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dtype = shared.problem.dtype
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))


def _run(
    shared: Shared, decision: Decision, tensors: tuple[Tensor, Tensor, Tensor], arguments: Mapping[str, Any]
) -> Any:
    try:
        with torch.autocast(tensors[0].device.type, enabled=False):
            q, k, v = _inputs(shared, tensors, arguments)
            out, lse = shared.run(decision.order, q, k, v, arguments.get("seq_lens"), arguments.get("key_mask"))
    except (AttnDispatchError, CHECKPOINT_STOP):
        raise
    except Exception as error:
        what = f"{NAME} ({decision.order}) failed on rank {shared.link.rank} on {shared.problem}"
        raise BackendFailed(f"{what}: {type(error).__name__}: {error}") from error
    out = out.transpose(1, 2) if arguments.get("layout", "bnhd") == "bhnd" else out
    return (out, lse) if arguments.get("return_lse") else out
