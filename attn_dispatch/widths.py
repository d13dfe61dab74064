"""Calls that no backend sees as they are: values of another width than keys, another alignment, empty sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import SHORTHANDS, Problem, choose_pattern

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
    same = all(isinstance(x, Tensor) and x.ndim == 4 for x in (k, v)) and k.shape[:-1] == v.shape[:-1]
    if not all(isinstance(x, Tensor) and not x.numel() for x in (q, k, v)):  # what is empty is checked later
        given: dict[str, Any] = {name: arguments.get(name) for name in ("key_mask", "bias", "alibi_slopes")}
        Problem.of(q, k, k if same else v, layout=layout, **given)


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
    kinds = {name: arguments.pop(name, default) for name, default in SHORTHANDS.items()}
    pattern = choose_pattern(arguments["pattern"], **kinds)
    others = [name for name in ("mesh", "key_lens", "documents", "cu_seqlens") if arguments.get(name) is not None]
    if pattern != Dense(is_causal=True) or others:
        what = f"with {others[0]}" if others else f"for {pattern}"
        raise InvalidInput(f"alignment='upper_left' is for causal Dense attention of whole tensors, not {what}")
    if not torch.compiler.is_dynamo_compiling():
        check_whole(q, k, v, layout, arguments)
    tokens = 1 if layout == "bnhd" else 2
    q_len, k_len = q.shape[tokens], k.shape[tokens]
    arguments["pattern"] = pattern
    if q_len > k_len:  # later queries see all keys
        if arguments.get("alibi_slopes") is not None:
            raise InvalidInput(f"alibi_slopes with alignment='upper_left' need q_len <= k_len, got {q_len} and {k_len}")
        arguments["pattern"] = Window(None, q_len - k_len)
        return q, k, v
    for name in ("key_mask", "bias"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][..., :q_len]
    return q, k.narrow(tokens, 0, q_len), v.narrow(tokens, 0, q_len)


def empty_result(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, layout: str, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse without queries, or without keys: zeros and -inf, with gradients of zero.

    Raises:
        InvalidInput: an argument is wrong.
    """
    tokens = 1 if layout == "bnhd" else 2
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise InvalidInput(
            f"q, k and v must have one batch size, and k and v equal shapes but for head_dim, got {shapes}"
        )
    kinds = {name: arguments[name] for name in ("segment_lengths", "dilation_rates", "is_causal")}
    choose_pattern(pattern, **kinds).check(q.shape[tokens], k.shape[tokens])
    stand_ins = _stand_in(q, tokens), _stand_in(k, tokens), _stand_in(k, tokens)
    checked = Problem.of(*stand_ins, layout=layout, device=q.device)
    heads_first = q.shape if layout == "bhnd" else q.transpose(1, 2).shape
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = torch.full(heads_first[:-1], -math.inf, dtype=sum_dtype(checked.dtype), device=q.device)
    given = [x for x in (q, k, v, arguments["bias"]) if x is not None and x.requires_grad]
    if torch.is_grad_enabled() and given:
        zero = sum(x[..., :0].sum() for x in given)  # of no entry, so that NaN does not matter
        out, lse = out + zero, lse + zero
    return out.to(q.dtype), lse


def _stand_in(x: Tensor, tokens: int) -> Tensor:
    """A tensor of one token and one batch row where x has none, so that everything else can be checked."""
    shape = [max(1, size) if axis in (0, tokens) else size for axis, size in enumerate(x.shape)]
    return torch.empty(shape, dtype=x.dtype, device="meta")
