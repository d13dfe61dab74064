"""`attend` and `explain` over a mesh: checks the arguments, agrees with the other ranks on an exchange, and runs it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.decisions.call import notify, observed
from attn_dispatch.decisions.decide import drop_oldest
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels.autograd import CHECKPOINT_STOP
from attn_dispatch.log import logger
from attn_dispatch.ring import dtensors, group_decision
from attn_dispatch.ring.link import Link, agree, digest_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, ZIGZAG, Layout
from attn_dispatch.ring.sharded_problem import ShardedProblem
from attn_dispatch.ring.shards import Sharded, spread_of
from attn_dispatch.ring.trial import NAME
from attn_dispatch.settings import budget_ms, expected_calls, mode
from attn_dispatch.spec.orders import EXCHANGES, LOCAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem, choose_pattern
from attn_dispatch.spec.tensors import check_seq_lens_values
from attn_dispatch.spec.tracing import ContextParallel, is_dtensor
from attn_dispatch.store.decision import Decision

SCORE_ARGUMENTS = ("softcap", "bias", "alibi_slopes")  #: of attend, that ranks do not take
MAX_DECISIONS = 256  #: remembered for each link

Decided = tuple[ShardedProblem, Decision]


@dataclass(frozen=True, eq=False)
class MeshCall:
    """The checked arguments of a call on this rank.

    Args:
        local: the problem of this rank's shard alone.
        pattern: of the whole sequence.
        kind: of the shards.
        exchange: the forced one, or None.
        settings: values of environment variables that must be equal on all ranks.
    """

    local: Problem
    pattern: Pattern
    kind: str
    exchange: str | None
    seq_lens: Tensor | None
    settings: dict[str, Any]

    @cached_property
    def equal_arguments(self) -> dict[str, Any]:
        """The arguments that must be equal on every rank, in plain values."""
        plain = self.local.to_dict()
        for name in ("q_len", "k_len", "strides", "ranks"):
            del plain[name]
        lens = self.seq_lens
        # Reading a CUDA tensor would wait for the device.
        values = None if lens is None or lens.device.type != "cpu" else lens.tolist()
        about = {"shards": self.kind, "order": self.exchange, **self.settings, "torch": str(torch.__version__)}
        return {**plain, **about, "pattern": self.pattern.to_dict(), "seq_lens": values}

    @cached_property
    def key(self) -> Any:
        return digest_of(self.equal_arguments), self.local.strides


def attend_over(link: Link, kind: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    """`attend` over a link's ranks. Arguments and results are those of `attend`; `kind` is that of the shards."""
    try:
        call = _checked(q, k, v, kind, **arguments)
    except AttnDispatchError as error:
        agree(link, {}, 0, 0, error)  # sends the error to the other ranks and raises it
        raise
    sharded, decision = _decision_for(link, call, (q, k, v), arguments)
    return _run(sharded, decision, (q, k, v), arguments)


def explain_over(link: Link, kind: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """`explain` over a link's ranks, without communication. Before a first call, the other shards are assumed to be as
    long as this one.
    """
    call = _checked(q, k, v, kind, **arguments)
    found: Decided | None = link.decisions.get(call.key)
    if found is not None and found[0].layout.lengths[link.rank] == call.local.q_len:
        return Explanation.of(found[1])
    lengths = (call.local.q_len,) * link.size
    return Explanation.of(group_decision.explained(_sharded(link, call, lengths), call.exchange))


def _checked(
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
    first_head: int | None = None,
    all_heads: int | None = None,
    **rest: Any,
) -> MeshCall:
    """Check the arguments, as far as possible without the other ranks.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if first_head is not None or all_heads is not None:
        raise InvalidInput(
            f"over a mesh every rank holds all heads: first_head and all_heads must be None, got {first_head!r} and "
            f"{all_heads!r}"
        )
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
    return MeshCall(replace(local, has_seq_lens=seq_lens is not None), chosen, kind, order, seq_lens, _settings())


def scaled_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """attend's arguments without those that change scores besides scaling them. Raises InvalidInput if one is given."""
    for name in SCORE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise InvalidInput(f"{name} cannot be given with mesh: over ranks scores are only scaled")
    return {name: value for name, value in arguments.items() if name not in SCORE_ARGUMENTS}


def attend_on(attend: Callable[..., Any], mesh: Any, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Any:
    """`attend` over a mesh, by attend() itself where it has one rank; on DTensors by their own, and `mesh` is None."""
    if any(map(is_dtensor, (q, k, v))):
        return dtensors.attend_local(attend, q, k, v, {**arguments, "mesh": mesh})
    link, spread = spread_over(mesh)
    if link.size > 1:
        return attend_over(link, spread.kind, q, k, v, **scaled_only(arguments))
    arguments["backend"], arguments["order"] = alone(arguments["backend"], arguments["order"])
    return attend(q, k, v, **arguments)


def spread_over(mesh: object) -> tuple[Link, Sharded]:
    """`spread_of`, for torch's context_parallel too."""
    if isinstance(mesh, ContextParallel):
        mesh = Sharded(mesh.mesh, ZIGZAG if mesh.balanced else CONTIGUOUS)
    return spread_of(mesh)


def alone(backend: str | None, order: str | None) -> tuple[str | None, str | None]:
    """The forced backend and order of a single rank, translated for one device.

    Raises:
        NoBackend: the order is an exchange with other ranks.
    """
    if order in EXCHANGES and order != LOCAL:
        raise NoBackend(f"{order!r} cannot run over a single rank: {group_decision.NOTHING_TO_EXCHANGE}")
    return None if backend == NAME else backend, None if order == LOCAL else order


def _settings() -> dict[str, Any]:
    """The environment variables that must be equal on all ranks. In mode "tune" these include the settings of trials,
    which all ranks must end in the same round.

    Raises:
        InvalidInput: an environment variable is wrong.
    """
    found = mode()
    trials = {"budget_ms": budget_ms(), "expected_calls": expected_calls()} if found == "tune" else {}
    return {"mode": found, **trials}


def _decision_for(link: Link, call: MeshCall, tensors: Any, arguments: Mapping[str, Any]) -> Decided:
    """The sharded problem and the decision of all ranks: remembered from an earlier call, or made now; a collective."""
    found: Decided | None = link.decisions.get(call.key)
    decision_id = 0 if found is None else _decision_id(*found)
    agreement = agree(link, call.equal_arguments, call.local.q_len, decision_id)
    if found is not None and agreement.same_decision and agreement.lengths == found[0].layout.lengths:
        return found
    sharded = _sharded(link, call, agreement.lengths)
    notify(sharded.problem)
    masks = {name: arguments[name] for name in ("seq_lens", "key_mask") if arguments.get(name) is not None}
    with torch.device("cpu"):  # not the default device of the caller
        decision = group_decision.decide_together(sharded, _inputs(sharded, tensors, arguments), masks, call.exchange)
    logger.info("%s: %s (%s)", sharded.problem, decision.order, decision.decided_by)
    link.decisions[call.key] = sharded, decision
    drop_oldest(link.decisions, MAX_DECISIONS)
    return sharded, decision


def _decision_id(sharded: ShardedProblem, decision: Decision) -> int:
    """A number that ranks share if they have the same decision for the same shards; never 0."""
    text = f"{decision.order} {sharded.layout} {decision.created if decision.source == 'measured' else decision.source}"
    return zlib.crc32(text.encode()) + 1


def _sharded(link: Link, call: MeshCall, lengths: tuple[int, ...]) -> ShardedProblem:
    """The whole sequence's problem.

    Raises:
        InvalidInput: the pattern or seq_lens do not fit it; on all ranks.
    """
    tokens = sum(lengths)
    if call.seq_lens is not None:
        check_seq_lens_values(call.seq_lens, tokens)
    problem = replace(
        call.local,
        pattern=_fitting(call.pattern, tokens, call.local.heads),
        given=call.pattern,
        q_len=tokens,
        k_len=tokens,
        strides=("bnhd", "bnhd", "bnhd"),  # strides may differ between ranks
        ranks=link.size,
    )
    return ShardedProblem(problem, Layout(lengths, call.kind), link)


@lru_cache(maxsize=256)
def _fitting(pattern: Pattern, tokens: int, heads: int) -> Pattern:
    pattern.check(tokens, tokens)
    return pattern.simplify(tokens, tokens, heads)


def _inputs(sharded: ShardedProblem, tensors: tuple[Tensor, Tensor, Tensor], arguments: Mapping[str, Any]) -> Any:
    """q, k and v [batch, tokens, heads, head_dim], in the problem's dtype."""
    q, k, v = tensors
    if arguments.get("layout", "bnhd") == "bhnd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dtype = sharded.problem.dtype
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))


def _run(
    sharded: ShardedProblem, decision: Decision, tensors: tuple[Tensor, Tensor, Tensor], arguments: Mapping[str, Any]
) -> Any:
    try:
        with torch.autocast(tensors[0].device.type, enabled=False):
            q, k, v = _inputs(sharded, tensors, arguments)
            run = observed(sharded.run, sharded.problem)
            out, lse = run(decision.order, q, k, v, arguments.get("seq_lens"), arguments.get("key_mask"))
    except (AttnDispatchError, CHECKPOINT_STOP):
        raise
    except Exception as error:
        what = f"{NAME} ({decision.order}) failed on rank {sharded.link.rank} on {sharded.problem}"
        raise BackendFailed(f"{what}: {type(error).__name__}: {error}") from error
    out = out.transpose(1, 2) if arguments.get("layout", "bnhd") == "bhnd" else out
    return (out, lse) if arguments.get("return_lse") else out
