"""xFormers' memory_efficient_attention, on any device that attend() has a backend for.

Source of the interface: facebookresearch/xformers, xformers/ops/fmha of 0.0.35.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.compat.flash_attn import sequences
from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Pattern, Window

_PATTERNS: dict[str, Callable[[Any], Pattern]] = {
    "LowerTriangularFromBottomRightMask": lambda mask: Dense(is_causal=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda mask: Window(mask._window_size - 1, 0),
    "LocalAttentionFromBottomRightMask": lambda mask: Window(mask.window_left, mask.window_right),
}


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Any:
    """xformers.ops.memory_efficient_attention.

    Args:
        query, key, value: [batch, len, heads, head_dim]; or [batch, len, head_dim] for one head; or [batch, len,
            groups, heads, head_dim], heads of a group sharing keys (expanded, with stride 0).
        attn_bias: None, a tensor [batch, heads, q_len, k_len], with axes as the query has them, that is added to the
            scores, or one of xFormers' masks:
            LowerTriangularMask (the first query and key aligned), LowerTriangularFromBottomRightMask,
            LowerTriangularFromBottomRightLocalAttentionMask, LocalAttentionFromBottomRightMask, BlockDiagonalMask,
            BlockDiagonalCausalMask. The last two may have other lengths of keys than of queries.
        p: dropout.
        op: must be None: attend() chooses.
        output_dtype: must be None or that of the query.

    Raises:
        InvalidInput: an argument is wrong, or asks for what attend() has not.
    """
    if op is not None:
        raise InvalidInput(f"op must be None: attend() chooses the kernel, got {op!r}")
    if not all(isinstance(x, Tensor) and x.ndim == query.ndim and 3 <= x.ndim <= 5 for x in (query, key, value)):
        shapes = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (query, key, value)]
        raise InvalidInput(f"query, key and value must have 3 to 5 axes, the same number each, got {shapes}")
    if output_dtype not in (None, query.dtype):
        raise InvalidInput(f"output_dtype must be None or {query.dtype}, got {output_dtype}")
    shape = query.shape
    q, k, v = _four_axes(query, key, value)
    more: dict[str, Any] = {"dropout_p": p, "scale": scale}
    kind = type(attn_bias).__name__
    if isinstance(attn_bias, Tensor):
        bias = attn_bias.unsqueeze(1) if attn_bias.ndim == 3 else attn_bias
        bias = bias.flatten(1, 2) if attn_bias.ndim == query.ndim == 5 else bias
        out = attend(q, k, v, bias=bias, **more)
    elif attn_bias is None or kind == "LowerTriangularMask":
        causal = attn_bias is not None
        out = attend(q, k, v, is_causal=causal, **_aligned(causal, q, k), **more)
    elif kind in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        out = _block_diagonal(q, k, v, attn_bias, kind == "BlockDiagonalCausalMask", more)
    elif kind in _PATTERNS:
        out = attend(q, k, v, _PATTERNS[kind](attn_bias), **more)
    else:
        raise InvalidInput(f"attn_bias must be None, a tensor or one of the masks in this function's help, got {kind}")
    return out.reshape(*shape[:-1], value.shape[-1])


def _four_axes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """All three as [batch, len, heads, head_dim]."""
    if query.ndim < 5:
        return tuple(x if x.ndim == 4 else x.unsqueeze(2) for x in (query, key, value))
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise InvalidInput(f"query, key and value must have the same number of groups of heads, got {shapes}")
    if key.stride(3) == value.stride(3) == 0:  # heads of a group share one
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _block_diagonal(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, more: dict[str, Any]) -> Tensor:
    """Sequences one after the other; the first query of each is aligned with its first key."""
    if len(q) != 1:
        raise InvalidInput(f"{type(mask).__name__} needs a batch of one row, got {len(q)}")
    names = "attn_bias.q_seqinfo", "attn_bias.k_seqinfo"
    starts = {name: list(each.seqstart_py) for name, each in zip(names, (mask.q_seqinfo, mask.k_seqinfo))}
    parts = sequences(q, k, v, starts)
    if starts[names[0]] == starts[names[1]]:
        found: Tensor = attend(q, k, v, Dense(causal), cu_seqlens=torch.tensor(starts[names[0]]), **more)
        return found
    results = (attend(q, k, v, is_causal=causal, **_aligned(causal, q, k), **more) for q, k, v in parts)
    return torch.cat(list(results), 1)


def _aligned(causal: bool, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The alignment of the first query with the first key; the usual one is quicker where it is the same."""
    return {"alignment": "upper_left"} if causal and q.shape[1] != k.shape[1] else {}
