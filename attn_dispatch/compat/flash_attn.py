"""The functions of flash-attn 2, on any device that attend() has a backend for.

Source of the interface: Dao-AILab/flash-attention, flash_attn_interface.py of 2.8.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Pattern, Window


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
    _check_probabilities(return_attn_probs, dropout_p)
    with _deterministic(deterministic):
        found = attend(
            q, k, v, _pattern(causal, window_size), dropout_p=dropout_p, scale=softmax_scale, softcap=softcap or None,
            alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
        )  # fmt: skip
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
    _check_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        raise InvalidInput("block_table must be None: keys in pages are not supported")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor [tokens, heads, head_dim], got {got}")
    pattern = _pattern(causal, window_size)
    common: dict[str, Any] = {"dropout_p": dropout_p, "scale": softmax_scale, "softcap": softcap or None}
    common["return_lse"] = return_attn_probs
    parts: list[tuple[Tensor, Any]] = []
    by_sequence = alibi_slopes is not None and alibi_slopes.ndim == 2
    _check_starts("cu_seqlens_q", cu_seqlens_q)
    _check_starts("cu_seqlens_k", cu_seqlens_k)
    if alibi_slopes is not None and by_sequence and len(alibi_slopes) != len(cu_seqlens_q) - 1:
        shape, sequences = list(alibi_slopes.shape), len(cu_seqlens_q) - 1
        raise InvalidInput(f"alibi_slopes must be [heads] or [sequences, heads], got {shape} for {sequences} sequences")
    with _deterministic(deterministic):
        if torch.equal(cu_seqlens_q, cu_seqlens_k) and not by_sequence:
            found = attend(
                q[None], k[None], v[None], pattern, cu_seqlens=cu_seqlens_q, alibi_slopes=alibi_slopes, **common
            )
            parts.append(found if return_attn_probs else (found, None))
        else:
            starts = _starts("cu_seqlens_q", cu_seqlens_q, q), _starts("cu_seqlens_k", cu_seqlens_k, k)
            if len(starts[0]) != len(starts[1]):
                sizes = [len(each) for each in starts]
                raise InvalidInput(
                    f"cu_seqlens_q and cu_seqlens_k must have equal lengths, got {sizes[0]} and {sizes[1]}"
                )
            for row, ((a, b), (c, d)) in enumerate(zip(*map(pairwise, starts))):
                slopes = alibi_slopes[row] if alibi_slopes is not None and by_sequence else alibi_slopes
                found = attend(q[None, a:b], k[None, c:d], v[None, c:d], pattern, alibi_slopes=slopes, **common)
                parts.append(found if return_attn_probs else (found, None))
    out = torch.cat([out[0] for out, _ in parts])
    return (out, torch.cat([lse[0] for _, lse in parts], 1), None) if return_attn_probs else out


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


def _check_probabilities(wanted: bool, dropout_p: float) -> None:
    if wanted and dropout_p:
        raise InvalidInput("return_attn_probs gives no dropout pattern: it needs dropout_p = 0")


def _check_starts(name: str, given: object) -> None:
    if not isinstance(given, Tensor) or given.ndim != 1 or given.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"{name} must be an int32 or int64 tensor [sequences + 1], got {given!r}")


def _starts(name: str, given: Tensor, x: Tensor) -> list[int]:
    found: list[int] = given.tolist()
    if len(found) < 2 or (found[0], found[-1]) != (0, len(x)) or found != sorted(found):
        raise InvalidInput(f"{name} must rise from 0 to {len(x)}, got {found[:8]}")
    return found


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
