"""Calls that no backend sees as they are: values of another width than keys, another alignment, empty sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.decisions.graphs import operators
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec import tracing
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import SHORTHANDS, Problem, choose_pattern

_least: Callable[..., Any] = torch.sym_min
ALIGNMENTS = ("lower_right", "upper_left")


def unequal_or_empty(q: object, k: object, v: object) -> bool:
    """Whether values have another width than keys, or there is nothing to compute."""
    found = [x for x in (q, k, v) if isinstance(x, Tensor) and x.ndim == 4]
    if len(found) < 3:
        return False  # what Problem.of raises for
    return found[1].shape[-1] != found[2].shape[-1] or 0 in (found[0].numel(), found[1].numel())


def padded(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one head_dim: columns of zeros change no score, and give columns of zeros in out.

    A scale that is not given is set to that of the keys' width.

    Raises:
        InvalidInput: q has another width than k.
    """
    if q.shape[-1] != k.shape[-1]:  # said before the padding changes the numbers
        raise InvalidInput(f"q and k must have one head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if arguments.get("scale") is None:
        arguments["scale"] = q.shape[-1] ** -0.5
    more = k.shape[-1] - v.shape[-1]
    return (q, k, pad(v, (0, more))) if more > 0 else (pad(q, (0, -more)), pad(k, (0, -more)), v)


def check_whole(q: Tensor, k: Tensor, v: Tensor, layout: str, arguments: dict[str, Any]) -> None:
    """Check tensors that are about to be cut. Raises InvalidInput."""
    given: dict[str, Any] = {name: arguments.get(name) for name in ("key_mask", "bias", "alibi_slopes")}
    if not tracing.graphed(q, k, v):
        Problem.of(q, k, _as_wide(v, k), layout=layout, may_be_empty=True, **given)
        return
    operators.check(q, k, v, layout)  # the operator checks the rest when it runs
    k_len = k.shape[layout.index("n")]
    for name, axis in (("v", layout.index("n")), ("key_mask", -1), ("bias", -1)):
        x: Any = v if name == "v" else given[name]
        if x is not None and not (isinstance(x, Tensor) and x.ndim and x.shape[axis] == k_len):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor with the {k_len} keys of k, got {got}")


def aligned(q: Tensor, k: Tensor, v: Tensor, layout: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v whose last tokens are aligned, with attend's other `arguments` changed to fit. Takes `alignment` out.

    Raises:
        InvalidInput: an alignment that there is not, or not for this call.
    """
    alignment = arguments.pop("alignment")
    if alignment == ALIGNMENTS[0]:
        return q, k, v
    if alignment not in ALIGNMENTS:
        raise InvalidInput(f"alignment must be one of {ALIGNMENTS}, got {alignment!r}")
    kinds = {name: arguments.get(name, default) for name, default in SHORTHANDS.items()}
    pattern = choose_pattern(arguments["pattern"], **kinds)
    arguments.update(SHORTHANDS, pattern=pattern)
    others = [name for name in ("mesh", "key_lens") if arguments.get(name) is not None]
    if pattern != Dense(is_causal=True) or others:
        what = f"with {others[0]}" if others else f"for {pattern}"
        raise InvalidInput(f"alignment='upper_left' is for causal Dense attention of whole tensors, not {what}")
    check_whole(q, k, v, layout, arguments)
    tokens = layout.index("n")
    q_len, k_len = q.shape[tokens], k.shape[tokens]
    if arguments.get("alibi_slopes") is not None and q_len > k_len:
        raise InvalidInput(f"alibi_slopes with alignment='upper_left' need q_len <= k_len, got {q_len} and {k_len}")
    seen = _least(q_len, k_len)  # without a comparison, which a graph would hold
    arguments["pattern"] = Window(None, q_len - seen)  # queries after the last key see all
    for name in ("key_mask", "bias"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].narrow(-1, 0, seen)
    return q, k.narrow(tokens, 0, seen), v.narrow(tokens, 0, seen)


def empty_result(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse without queries, or without keys: zeros and -inf, with gradients of zero.

    Raises:
        InvalidInput: an argument is wrong.
    """
    problem = Problem.of(q, k, _as_wide(v, k), pattern, may_be_empty=True, **arguments)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=problem.dtype)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.full(shape, -math.inf, dtype=sum_dtype(problem.dtype), device=q.device)
    given = [x for x in (q, k, v, arguments["bias"]) if x is not None and x.requires_grad]
    if torch.is_grad_enabled() and given:
        zero = sum(x[..., :0].sum() for x in given)  # of no entry, so that NaN does not matter
        out, lse = out + zero, lse + zero
    return out, lse


def _as_wide(v: Any, k: Any) -> Any:
    """A tensor like v with k's shape where they differ in width alone, so that everything else can be checked."""
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (k, v)) or k.shape[:-1] != v.shape[:-1]:
        return v
    return v.new_empty(()).expand(k.shape)
