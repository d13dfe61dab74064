"""`attend` and `explain` over a mesh: checks the arguments, agrees with the other ranks on an exchange, and runs it."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_dispatch.decisions.call import Rewritten, notify, observed, only
from attn_dispatch.decisions.decide import drop_oldest
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.decisions.trial_limits import on_cpu
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NoBackend
from attn_dispatch.log import logger
from attn_dispatch.private import CheckpointStop
from attn_dispatch.ring import group_decision
from attn_dispatch.ring.link import Link, agree, digest_of, errors_sent
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.sharded_problem import NAME, Known, ShardedProblem, equal_on_ranks, local_problem
from attn_dispatch.ring.shards import Sharded, spread_of
from attn_dispatch.ring.trial import Trial
from attn_dispatch.settings import budget_ms, expected_calls, mode
from attn_dispatch.spec import tracing
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.orders import EXCHANGES, LOCAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import CONTIGUOUS, Call, Problem, choose_pattern
from attn_dispatch.spec.tensors import check_seq_lens, check_seq_lens_values, without_autocast
from attn_dispatch.store.decision import Decision

MAX_DECISIONS = 256  #: remembered for each link
TENSORS = "the pattern's tensors"

_links: WeakValueDictionary[int, Link] = WeakValueDictionary()  #: that operators name
Decided = tuple[ShardedProblem, Decision]


@dataclass(frozen=True, eq=False)
class MeshCall:
    """A checked call on this rank; its `order` is the forced exchange.

    Args:
        local: the problem of this rank's shard alone.
        pattern: of the whole sequence; `Held` where it holds tensors.
        kind: of the shards.
        settings: values of environment variables that must be equal on all ranks.
    """

    call: Call
    local: Problem
    pattern: Pattern
    kind: str
    settings: dict[str, Any]

    @cached_property
    def equal_arguments(self) -> dict[str, Any]:
        """The arguments that must be equal on every rank, in plain values."""
        lens, plain = self.call.seq_lens, equal_on_ranks(self.local, self.pattern, self.kind)
        # Reading a CUDA tensor would wait for the device.
        values = None if lens is None or lens.device.type != "cpu" else lens.tolist()
        about = {"order": self.call.order, "torch": str(torch.__version__), "seq_lens": values}
        about[TENSORS] = getattr(self.pattern, "digest", None)
        return {**plain, **self.settings, **about}

    @cached_property
    def key(self) -> Any:
        return digest_of({**self.equal_arguments, TENSORS: None}), self.local.strides


def over_mesh(call: Call) -> Rewritten:
    """The call of this rank's shard with those of the other ranks; where it is alone, a call on one device.

    Raises:
        NoBackend: the order is an exchange with other ranks, and there are none.
    """
    link, spread = spread_of(call.mesh)
    if link.size > 1:
        attended = lambda _: attend_over(link, spread.kind, call)  # noqa: E731 - short
        return Rewritten([], attended, lambda: [explain_over(link, spread.kind, call)])
    if call.order in EXCHANGES and call.order != LOCAL:
        raise NoBackend(f"{call.order!r} cannot run over a single rank: {group_decision.NOTHING_TO_EXCHANGE}")
    backend, order = (None if x in (NAME, LOCAL) else x for x in (call.backend, call.order))
    return Rewritten([call._replace(mesh=None, backend=backend, order=order)], only)


def attend_over(link: Link, kind: str, call: Call) -> Any:
    """`attend` over a link's ranks; `kind` is that of the shards."""
    with errors_sent(link):
        checked = _checked(call, kind)
    apart = tracing.is_traced(*call.qkv) or tracing.context_parallel() is not None
    if not apart and operators.applies(call._replace(mesh=None)):  # in a selective checkpoint
        _links[id(link)] = link
        return operators.attend_by_operator(call, f"{id(link)} {kind}")
    return call.returned(*_run(*_decision_for(link, checked), call))


def mesh_of(ranks: str) -> Sharded:
    """The mesh that `attend_over` gave an operator. Raises InvalidInput: its process group was destroyed."""
    number, kind = ranks.split()
    link = _links.get(int(number))
    return Sharded(link and link.group, kind)


def out_and_lse(call: Call, known: Known) -> tuple[Tensor, Tensor | None]:
    """What an operator over ranks computes where gradients are needed; `known`: what is not computed."""
    link, spread = spread_of(call.mesh)
    sharded, decision = _decision_for(link, _checked(call, spread.kind))
    with_lse = replace(sharded, problem=replace(sharded.problem, return_lse=True))
    found: tuple[Tensor, Tensor] = _run(with_lse, decision, call, known)
    return found


def explain_over(link: Link, kind: str, call: Call) -> Explanation:
    """`explain` over a link's ranks, without communication. Before a first call, the other shards are assumed to be as
    long as this one.
    """
    checked = _checked(call, kind)
    found: Decided | None = link.decisions.get(checked.key)
    if found is not None and found[0].layout.lengths[link.rank] == checked.local.q_len:
        return Explanation.of(found[1])
    lengths = (checked.local.q_len,) * link.size
    return Explanation.of(group_decision.explained(_sharded(link, checked, lengths), call.order))


def _checked(call: Call, kind: str) -> MeshCall:
    """Check the arguments, as far as possible without the other ranks.

    Raises:
        InvalidInput: an argument, or an environment variable, is wrong.
    """
    chosen, seq_lens = choose_pattern(call), call.seq_lens
    local = local_problem(call)
    if call.backend not in (None, NAME):
        raise InvalidInput(f"backend must be None or {NAME!r} over a mesh, got {call.backend!r}")
    if call.order is not None and call.order not in EXCHANGES:
        allowed = ", ".join(map(repr, EXCHANGES))
        raise InvalidInput(f"order must be None or one of {allowed} over a mesh, got {call.order!r}")
    check_seq_lens(seq_lens, local.batch, sys.maxsize, sys.maxsize, call.q.device)  # of all ranks' tokens
    settings: dict[str, Any] = {"mode": mode()}
    if settings["mode"] == "tune":  # all ranks must end a trial in the same round
        settings |= {"budget_ms": budget_ms(), "expected_calls": expected_calls()}
    if isinstance(chosen, DataPattern):
        if chosen.device != call.q.device:
            raise InvalidInput(f"the tensors of {chosen} must be on q's device {call.q.device}")
        facts = chosen.facts(chosen.queries)
        plain = None if facts is None else facts.plain
        chosen = Held.of(chosen, local.heads, local.kv_heads) if plain is None else plain
    return MeshCall(call, replace(local, has_seq_lens=seq_lens is not None), chosen, kind, settings)


def _decision_for(link: Link, checked: MeshCall) -> Decided:
    """The sharded problem and the decision of all ranks: remembered from an earlier call, or made now; a collective."""
    found: Decided | None = link.decisions.get(checked.key)
    decision_id = 0 if found is None else _decision_id(*found)
    agreement = agree(link, checked.equal_arguments, checked.local.q_len, decision_id)
    if found is not None and not (agreement.same_decision and agreement.lengths == found[0].layout.lengths):
        found = None
    if found is not None and not isinstance(checked.call.pattern, DataPattern):
        return found
    sharded = _sharded(link, checked, agreement.lengths)
    if found is not None and (found[1].order != LOCAL or not any(map(sharded.sees_others, range(link.size)))):
        return sharded, found[1]  # decided for a pattern with other tensors, maybe
    notify(sharded.problem)
    call, masks = checked.call, {name: x for name, x in checked.call.tensors.items() if x is not None}
    masks.pop("pattern_data", None)
    with on_cpu():
        trial = Trial(sharded, _inputs(sharded, call), masks)
        decision = group_decision.decide_together(sharded, trial.rows, call.order)
    logger.info("%s: %s (%s)", sharded.problem, decision.order, decision.decided_by)
    link.decisions[checked.key] = replace(sharded, held=None), decision
    drop_oldest(link.decisions, MAX_DECISIONS)
    return sharded, decision


def _decision_id(sharded: ShardedProblem, decision: Decision) -> int:
    """A number that ranks share if they have the same decision for the same shards; never 0."""
    text = f"{decision.order} {sharded.layout} {decision.created if decision.source == 'measured' else decision.source}"
    return zlib.crc32(text.encode()) + 1


def _sharded(link: Link, checked: MeshCall, lengths: tuple[int, ...]) -> ShardedProblem:
    """The whole sequence's problem.

    Raises:
        InvalidInput: the pattern or seq_lens do not fit it; on all ranks.
    """
    tokens = sum(lengths)
    if checked.call.seq_lens is not None:
        check_seq_lens_values(checked.call.seq_lens, tokens)
    local, given = checked.local, checked.pattern
    held = given if isinstance(given, Held) else None
    if isinstance(whole := checked.call.pattern, DataPattern):
        whole.check_call(checked.call.q.device, local.batch, tokens, tokens, local.heads, local.kv_heads)
        given = given if held is None else held.form
    pattern = _fitting(given, tokens, local.heads)
    problem = replace(local, pattern=pattern, given=given, q_len=tokens, k_len=tokens)
    problem = replace(problem, strides=CONTIGUOUS, ranks=link.size)  # strides may differ between ranks
    return ShardedProblem(problem, Layout(lengths, checked.kind), link, held)


@lru_cache(maxsize=256)
def _fitting(pattern: Pattern, tokens: int, heads: int) -> Pattern:
    pattern.check(tokens, tokens)
    return pattern.simplify(tokens, tokens, heads)


def _inputs(sharded: ShardedProblem, call: Call) -> Any:
    """q, k and v [batch, tokens, heads, head_dim], in the problem's dtype."""
    return tuple(x.to(sharded.problem.dtype) for x in call.tokens_first)


def _run(sharded: ShardedProblem, decision: Decision, call: Call, known: Known = None) -> Any:
    try:
        with without_autocast(call.q.device.type):
            run = observed(sharded.run, sharded.problem)
            return run(decision.order, *_inputs(sharded, call), call.seq_lens, call.key_mask, known)
    except (AttnDispatchError, CheckpointStop):
        raise
    except Exception as error:
        what = f"{NAME} ({decision.order}) failed on rank {sharded.link.rank} on {sharded.problem}"
        raise BackendFailed(f"{what}: {type(error).__name__}: {error}") from error
