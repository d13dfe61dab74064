"""The functions of flash-attn 2, on any device that attend() has a backend for.

Source of the interface: Dao-AILab/flash-attention, flash_attn_interface.py of 2.8.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.calls.packing import read_on_host
from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import torch_settings
from attn_dispatch.spec.checks import boolean
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import dropout


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func: the last query is aligned with the last key.

    Args:
        q: [batch, q_len, heads, head_dim]. k, v: [batch, k_len, kv_heads, head_dim].
        window_size: tokens to the left and right of a query; -1: all.
        softcap: 0 for none.
        alibi_slopes: [heads] or [batch, heads].
        deterministic: the backward pass gives the same bits each time.
        return_attn_probs: return (out, lse, None); lse is [batch, heads, q_len].

    Raises:
        InvalidInput: an argument is wrong, or asks for what attend() has not.
    """
    given = _given(causal, deterministic, return_attn_probs, dropout_p, softmax_scale, softcap)
    found = _attend(deterministic, q, k, v, _pattern(causal, window_size), alibi_slopes=alibi_slopes, **given)
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: sequences one after the other; of each, the last query and key are aligned.

    Args:
        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each sequence starts, and the last one ends.
        max_seqlen_q, max_seqlen_k: not needed; lengths follow from the starts.
        alibi_slopes: [heads] or [sequences, heads].
        return_attn_probs: return (out, lse, None); lse is [heads, tokens].

    Others as for `flash_attn_func`.

    Raises:
        InvalidInput: an argument is wrong, or asks for what attend() has not.
    """
    given = _given(causal, deterministic, return_attn_probs, dropout_p, softmax_scale, softcap)
    if block_table is not None:
        raise InvalidInput("block_table must be None: keys in pages are not supported")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor [tokens, heads, head_dim], got {got}")
    pattern = _pattern(causal, window_size)
    starts: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, x in starts.items():
        if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(f"{name} must be an int32 or int64 tensor [sequences + 1], got {x!r}")
    by_sequence = isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim == 2
    if alibi_slopes is not None and by_sequence and len(alibi_slopes) != len(cu_seqlens_q) - 1:
        shape, rows = list(alibi_slopes.shape), len(cu_seqlens_q) - 1
        raise InvalidInput(f"alibi_slopes must be [heads] or [sequences, heads], got {shape} for {rows} sequences")
    same = cu_seqlens_q is cu_seqlens_k and not by_sequence  # not read here, so that a graph may hold the call
    lists = {} if same else {name: read_on_host(name, x).tolist() for name, x in starts.items()}
    if same or (lists["cu_seqlens_q"] == lists["cu_seqlens_k"] and not by_sequence):
        given |= {"cu_seqlens": cu_seqlens_q, "alibi_slopes": alibi_slopes}
        parts = [_attend(deterministic, q[None], k[None], v[None], pattern, **given)]
    else:
        parts = []
        for row, three in enumerate(sequences(q[None], k[None], v[None], lists)):
            slopes = alibi_slopes[row] if alibi_slopes is not None and by_sequence else alibi_slopes
            parts.append(_attend(deterministic, *three, pattern, alibi_slopes=slopes, **given))
    if not return_attn_probs:
        return torch.cat([out[0] for out in parts])
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), None


def _pattern(causal: bool, window_size: tuple[int, int]) -> Pattern:
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        raise InvalidInput(f"window_size must be two integers, got {window_size!r}") from None
    right = 0 if causal else right
    if left < 0 and right < 0:
        return Dense()
    if left < 0 and right == 0:
        return Dense(is_causal=True)
    return Window(None if left < 0 else left, None if right < 0 else right)


def _given(
    causal: bool, deterministic: bool, return_attn_probs: bool, dropout_p: float, scale: Any, softcap: Any
) -> dict[str, Any]:
    """attend()'s arguments. Raises InvalidInput."""
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("return_attn_probs", return_attn_probs)):
        boolean(name, flag)
    if return_attn_probs and dropout(dropout_p):
        raise InvalidInput("return_attn_probs gives no dropout pattern: it needs dropout_p = 0")
    softcap = None if isinstance(softcap, (int, float)) and softcap == 0 else softcap
    return {"dropout_p": dropout_p, "scale": scale, "softcap": softcap, "return_lse": return_attn_probs}


def sequences(q: Tensor, k: Tensor, v: Tensor, starts: dict[str, list[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v [1, tokens, heads, head_dim] of each sequence, which stand one after the other.

    Args:
        starts: by the arguments' names, where each sequence's queries start and the last ones end; the same of keys.

    Raises:
        InvalidInput: they are not those of these tensors.
    """
    for (name, given), x in zip(starts.items(), (q, k)):
        if len(given) < 2 or (given[0], given[-1]) != (0, x.shape[1]) or given != sorted(given):
            raise InvalidInput(f"{name} must rise from 0 to {x.shape[1]}, got {given[:8]}")
    (first, of_q), (second, of_k) = starts.items()
    if len(of_q) != len(of_k):
        raise InvalidInput(f"{first} and {second} must have equal lengths, got {len(of_q)} and {len(of_k)}")
    if k.shape[1] != v.shape[1]:
        raise InvalidInput(f"keys and values must have equal lengths, got {k.shape[1]} and {v.shape[1]}")
    borders = zip(pairwise(of_q), pairwise(of_k))
    return [(q[:, a:b], k[:, c:d], v[:, c:d]) for (a, b), (c, d) in borders]


def _attend(deterministic: bool, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **arguments: Any) -> Any:
    """attend(), in torch's deterministic mode if asked: a graph cannot hold that, so it is called between graphs."""
    if not deterministic:
        return attend(q, k, v, pattern, **arguments)
    run: Any = _attend_so
    if torch.compiler.is_dynamo_compiling():
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(q, k, v, pattern, **arguments)


def _attend_so(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **arguments: Any) -> Any:
    with torch_settings.settings(True):
        return attend(q, k, v, pattern, **arguments)
