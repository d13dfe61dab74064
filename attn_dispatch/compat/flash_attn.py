"""The functions of flash-attn 2, on any device that attend() has a backend for.

Source of the interface: Dao-AILab/flash-attention, flash_attn_interface.py of 2.8.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.calls.packing import read_on_host
from attn_dispatch.compat.names import attend_as, check_axes, renamed
from attn_dispatch.compat.sequences import borders, sequences
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import torch_settings
from attn_dispatch.spec.checks import boolean, integer
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import Call, Problem, dropout

_WORDS = {"scale": "softmax_scale", "bias": "attend()'s bias"}
_OF_CACHE = {**_WORDS, "k": "k_cache", "v": "v_cache", "key_mask": "cache_leftpad", "key_lens": "cache_seqlens"}
_run = attend_as(**_WORDS, cu_seqlens="cu_seqlens_q", documents="cu_seqlens_k")
_attend_to_cache, _check = attend_as(**_OF_CACHE), renamed(Problem.of_call, _OF_CACHE)


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
    check_axes((3,), "[tokens, heads, head_dim]", q=q, k=k, v=v)
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
        names, parts = ("cu_seqlens_q", "cu_seqlens_k"), []
        of_q, of_k = (borders(name, lists[name], len(each)) for name, each in zip(names, (q, k)))
        for row, three in enumerate(sequences(q[None], k[None], v[None], names, of_q, of_k)):
            slopes = alibi_slopes[row] if alibi_slopes is not None and by_sequence else alibi_slopes
            parts.append(_attend(deterministic, *three, pattern, alibi_slopes=slopes, **given))
    if not return_attn_probs:
        return torch.cat([out[0] for out in parts])
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache: queries over a cache, to which new keys and values are written first.

    Args:
        q: [batch, q_len, heads, head_dim]; the last one is aligned with the last key of its row.
        k_cache, v_cache: [rows, k_len, kv_heads, head_dim].
        k, v: [batch, new, kv_heads, head_dim], written into the cache from cache_seqlens on.
        rotary_cos, rotary_sin: [positions, half of the rotated dimensions]: k, and q if causal or in a window, are
            rotated by those from cache_seqlens on, other q by that of cache_seqlens.
        cache_seqlens: filled keys: an integer, or int32 or int64 [batch]; None: all.
        cache_batch_idx: [batch], the row of the cache of each row of q: they are copied.
        cache_leftpad: [batch], the first key of each row.
        rotary_interleaved: pairs are dimensions 0 and 1, and so on; else 0 and half of the rotated ones.
        num_splits: not needed: attend() chooses.
        return_softmax_lse: return (out, lse); lse is [batch, heads, q_len].

    Others as for `flash_attn_func`. It has no gradients.

    Raises:
        InvalidInput: an argument is wrong, or asks for what attend() has not.
    """
    for name, flag in (("rotary_interleaved", rotary_interleaved), ("return_softmax_lse", return_softmax_lse)):
        boolean(name, flag)
    if block_table is not None:
        raise InvalidInput("block_table must be None: keys in pages are not supported")
    tensors = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))
    for name, x in tensors:
        if x is not None or name in ("q", "k_cache", "v_cache"):
            check_axes((4,), "[batch, len, heads, head_dim]", **{name: x})
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(f"{name} requires a gradient, which a cache has not: call it under torch.no_grad()")
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise InvalidInput("k and v must be given together, and so must rotary_cos and rotary_sin")
    if k is None and rotary_cos is not None:
        raise InvalidInput("rotary_cos and rotary_sin need k and v: keys of the cache are not rotated")
    if k is not None and cache_seqlens is None:
        raise InvalidInput("k and v need cache_seqlens, which says where they are written")
    batch, new = len(q), 0 if k is None else k.shape[1]
    for name, x in tensors[3:]:
        cache = k_cache if name == "k" else v_cache
        shape = [batch, new, *cache.shape[2:]]
        if x is not None and (list(x.shape) != shape or x.dtype != cache.dtype or x.device != cache.device):
            got, kind = f"{list(x.shape)}, {x.dtype}, on {x.device}", f"{cache.dtype}, on {cache.device}"
            raise InvalidInput(f"{name} must be {shape}, {kind}, as {name}_cache is, got {got}")
    if v_cache.shape[:3] != k_cache.shape[:3] or (cache_batch_idx is None and len(k_cache) != batch):
        got = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise InvalidInput(
            f"k_cache and v_cache must have the same rows, keys and heads, and {batch} rows or "
            f"cache_batch_idx, got {got}"
        )
    k_len, pattern = k_cache.shape[1], _pattern(causal, window_size)
    lengths = _row_numbers("cache_seqlens", cache_seqlens, batch, k_len - new, q.device)
    rows = _row_numbers("cache_batch_idx", cache_batch_idx, batch, len(k_cache) - 1, q.device)
    first = _row_numbers("cache_leftpad", cache_leftpad, batch, k_len, q.device)
    seen = None if first is None else torch.arange(k_len, device=q.device) >= first[:, None]
    given = _given(causal, False, return_softmax_lse, 0.0, softmax_scale, softcap)
    more: dict[str, Any] = {"alibi_slopes": alibi_slopes, "key_mask": seen}
    keys = k_cache[:1].expand(batch, -1, -1, -1)
    values = v_cache.new_empty(()).expand(keys.shape)  # may be wider
    _check(Call(q, keys, values, pattern, **more, **given), may_be_empty=True)  # raises before a cache is written
    if k is not None and v is not None:
        assert lengths is not None
        positions = lengths[:, None] + torch.arange(new, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            turn = partial(_rotated, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved)
            steps = torch.arange(q.shape[1], device=q.device) if pattern != Dense() else 0
            q, k = turn(q, lengths[:, None] + steps), turn(k, positions)
        into = torch.arange(batch, device=q.device) if rows is None else rows
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache[into[:, None], positions] = x
    if rows is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    if isinstance(cache_seqlens, int):  # alike in all rows: views
        filled = cache_seqlens + new
        k_cache, v_cache = k_cache[:, :filled], v_cache[:, :filled]
        more["key_mask"] = None if seen is None else seen[:, :filled]
    elif lengths is not None:
        more["key_lens"] = lengths + new
    return _attend_to_cache(q, k_cache, v_cache, pattern, **more, **given)


def _row_numbers(name: str, x: Any, batch: int, most: int, device: torch.device) -> Tensor | None:
    """An argument of one number for each row, int64. Raises InvalidInput; on a GPU values are not read."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        if integer(name, x, 0) > most:
            raise InvalidInput(f"{name} must lie in 0..{most}, got {x}")
        return torch.full((batch,), x, device=device)
    if x.dtype not in (torch.int32, torch.int64) or list(x.shape) != [batch] or x.device != device:
        got = f"{list(x.shape)}, {x.dtype}, on {x.device}"
        raise InvalidInput(f"{name} must be an int32 or int64 tensor [{batch}] on {device}, got {got}")
    if x.device.type == "cpu" and batch and not 0 <= int(x.min()) <= int(x.max()) <= most:
        raise InvalidInput(f"{name} must lie in 0..{most}, got {x.tolist()}")
    return x.long()


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [batch, len, heads, head_dim], turned in pairs by cos and sin at positions [batch, len or 1]."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor) or table.shape != cos.shape or table.ndim != 2:
            raise InvalidInput(f"{name} must be a tensor [positions, half of the rotated dimensions]")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidInput(f"rotary_cos must have at most {x.shape[-1] // 2} columns, got {cos.shape[1]}")
    if positions.device.type == "cpu" and positions.numel() and int(positions.max()) >= len(cos):
        raise InvalidInput(f"rotary_cos must have a row for position {int(positions.max())}, got {len(cos)} rows")
    c, s = (table[positions][:, :, None].float() for table in (cos, sin))
    turned, rest = x[..., : 2 * cos.shape[1]].float(), x[..., 2 * cos.shape[1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = torch.stack([a * c - b * s, a * s + b * c], -1 if interleaved else -2)
    return torch.cat([pair.flatten(-2).to(x.dtype), rest], -1)


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


def _attend(deterministic: bool, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **arguments: Any) -> Any:
    """attend(), in torch's deterministic mode if asked: a graph cannot hold that, so it is called between graphs."""
    if not deterministic:
        return _run(q, k, v, pattern, **arguments)
    run: Any = _attend_so
    if torch.compiler.is_dynamo_compiling():
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(q, k, v, pattern, **arguments)


def _attend_so(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **arguments: Any) -> Any:
    with torch_settings.settings(True):
        return _run(q, k, v, pattern, **arguments)
