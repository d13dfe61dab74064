"""Calls that no backend sees as they are: values of another width than keys, another alignment, empty sequences,
patterns whose tensors say no more than another pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.decisions.call import Rewritten, only
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.decisions.unmeasured import check_names
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec import tracing
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Call, Problem, choose_pattern

_least: Callable[..., Any] = torch.sym_min
ALIGNMENTS = ("lower_right", "upper_left")


def unequal(call: Call) -> bool:
    """Whether values have another width than keys."""
    return _have_axes(call) and call.k.shape[-1] != call.v.shape[-1]


def is_empty(call: Call) -> bool:
    """Whether there is nothing to compute."""
    return _have_axes(call) and 0 in (call.q.numel(), call.k.numel())


def _have_axes(call: Call) -> bool:
    return all(
        isinstance(x, Tensor) and x.ndim == 4 and not x.is_nested for x in call.qkv
    )  # else `Problem.of_call` raises


def widths(call: Call) -> Rewritten | None:
    """q, k and v of one head_dim: columns of zeros change no score, and give columns of zeros in out.

    The scale stays that of the keys' width. Where q has another one than k, `Problem.of_call` raises.
    """
    if not unequal(call) or not call.q.shape[-1] == call.k.shape[-1] > 0:  # of which all ranks of a mesh must hear
        return None
    q, k, v = call.qkv
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    width, more = v.shape[-1], k.shape[-1] - v.shape[-1]
    q, k, v = (q, k, pad(v, (0, more))) if more > 0 else (pad(q, (0, -more)), pad(k, (0, -more)), v)

    def narrowed(results: list[Any]) -> Any:
        (found,) = results
        return (found[0][..., :width], found[1]) if call.return_lse else found[..., :width]

    return Rewritten([call._replace(q=q, k=k, v=v, scale=scale)], narrowed)


def alignment(call: Call) -> Rewritten | None:
    """q, k and v whose last tokens are aligned, with the other arguments changed to fit.

    Raises:
        InvalidInput: an alignment that there is not, or not for this call.
    """
    if call.alignment == ALIGNMENTS[0]:
        return None
    if call.alignment not in ALIGNMENTS:
        raise InvalidInput(f"alignment must be one of {ALIGNMENTS}, got {call.alignment!r}")
    pattern = choose_pattern(call)
    others = [name for name in ("mesh", "key_lens") if getattr(call, name) is not None]
    window: Any = Window(None, 0) if pattern == Dense(is_causal=True) else pattern
    if getattr(window, "sinks", 1) or others:  # other patterns have none
        what = f"with {others[0]}" if others else f"for {pattern}"
        raise InvalidInput(
            f"alignment='upper_left' is for causal Dense and Window attention of whole tensors, not {what}"
        )
    operators.check_whole(call)
    tokens = call.layout.index("n")
    q_len, k_len = call.q.shape[tokens], call.k.shape[tokens]
    if call.alibi_slopes is not None and q_len > k_len:
        raise InvalidInput(f"alibi_slopes with alignment='upper_left' need q_len <= k_len, got {q_len} and {k_len}")
    left, right = window.left, window.right
    # Without a comparison, which a graph would hold.
    seen = k_len if right is None else _least(q_len + right, k_len)
    changes: dict[str, Any] = {name: getattr(call, name).narrow(tokens, 0, seen) for name in ("k", "v")}
    for name in ("key_mask", "bias"):
        if getattr(call, name) is not None:
            changes[name] = getattr(call, name).narrow(-1, 0, seen)
    more = q_len - seen  # the last query is aligned with a key that is so much before it
    if left is not None and left < more:
        raise InvalidInput(
            f"{pattern} with alignment='upper_left' needs q_len <= k_len + {left}, got {q_len} and {k_len}: "
            "let out the queries that see no key"
        )
    found = Window(None if left is None else left - more, None if right is None else right + more)
    return Rewritten([call.with_pattern(found, alignment=ALIGNMENTS[0], **changes)], only)


def without_tensors(call: Call) -> Rewritten | None:
    """The call as `plain_call` has it."""
    found = call if call.mesh is not None else plain_call(call)
    return None if found is call else Rewritten([found], only)


def plain_call(call: Call) -> Call:
    """The call with a pattern without tensors where that sees the same: every backend may take it.

    Not of a call that is to be an operator, which does this when it runs, nor for a forced backend that takes the
    tensors. Raises InvalidInput: they do not fit the call.
    """
    pattern = call.pattern
    if not isinstance(pattern, DataPattern) or not _have_axes(call):
        return call
    n, h = (1, 2) if call.layout == "bnhd" else (2, 1)
    (batch, q_len, heads), (k_len, kv_heads) = (call.q.shape[x] for x in (0, n, h)), (call.k.shape[x] for x in (n, h))
    facts = pattern.facts(k_len)
    if facts is None or facts.plain is None or tracing.as_operator(*call.qkv):
        return call
    pattern.check_call(call.q.device, batch, q_len, k_len, heads, kv_heads)
    if call.backend in registry.names() and (backend := registry.load(call.backend)).takes_data:
        problem = Problem.of_call(call._replace(v=call.k))  # values may have another width
        return call._replace(pattern=facts.plain) if refusals_of(backend, problem) else call
    return call._replace(pattern=facts.plain)


def empty(call: Call) -> Rewritten | None:
    """Without queries, or without keys: zeros and -inf, with gradients of zero.

    Raises:
        InvalidInput: an argument is wrong.
    """
    return Rewritten([], lambda _: _nothing(call)) if is_empty(call) else None


def _nothing(call: Call) -> Any:
    check_names(call.backend, call.order)
    problem, q = Problem.of_call(call, may_be_empty=True), call.q
    out = q.new_zeros(q.shape, dtype=problem.dtype)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.full(shape, -math.inf, dtype=sum_dtype(problem.dtype), device=q.device)
    given = [x for x in (*call.qkv, call.bias) if x is not None and x.requires_grad]
    if torch.is_grad_enabled() and given:
        zero = sum(x[..., :0].sum() for x in given)  # of no entry, so that NaN does not matter
        out, lse = out + zero, lse + zero
    return (out, lse) if call.return_lse else out
