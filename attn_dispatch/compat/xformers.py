"""xFormers' memory_efficient_attention, on any device that attend() has a backend for.

Source of the interface: facebookresearch/xformers, xformers/ops/fmha of 0.0.35.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Window


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
    q, k, v = (_four_axes(x) for x in (query, key, value))
    more: dict[str, Any] = {"dropout_p": p, "scale": scale}
    mask: Any = attn_bias
    kind = "" if attn_bias is None or isinstance(attn_bias, Tensor) else type(attn_bias).__name__
    if isinstance(attn_bias, Tensor):
        bias = attn_bias.unsqueeze(1) if attn_bias.ndim == 3 else attn_bias
        bias = bias.flatten(1, 2) if attn_bias.ndim == query.ndim == 5 else bias
        out = attend(q, k, v, bias=bias, **more)
    elif kind in ("", "LowerTriangularMask"):
        causal, aligned = bool(kind), q.shape[1] == k.shape[1]
        out = attend(
            q, k, v, is_causal=causal, alignment="lower_right" if aligned or not causal else "upper_left", **more
        )
    elif kind == "LowerTriangularFromBottomRightMask":
        out = attend(q, k, v, is_causal=True, **more)
    elif kind == "LowerTriangularFromBottomRightLocalAttentionMask":
        out = attend(q, k, v, Window(mask._window_size - 1, 0), **more)
    elif kind == "LocalAttentionFromBottomRightMask":
        out = attend(q, k, v, Window(mask.window_left, mask.window_right), **more)
    elif kind in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        out = _block_diagonal(q, k, v, attn_bias, kind == "BlockDiagonalCausalMask", more)
    else:
        raise InvalidInput(f"attn_bias must be None, a tensor or one of the masks in this function's help, got {kind}")
    return out.reshape(*shape[:-1], value.shape[-1])


def _four_axes(x: Tensor) -> Tensor:
    if x.ndim == 3:
        return x.unsqueeze(2)
    if x.ndim == 4:
        return x
    if x.stride(3) == 0:  # heads of a group share one
        return x[:, :, :, 0]
    return x.flatten(2, 3)


def _block_diagonal(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, more: dict[str, Any]) -> Tensor:
    """Sequences one after the other; the first query of each is aligned with its first key."""
    starts = [list(each.seqstart_py) for each in (mask.q_seqinfo, mask.k_seqinfo)]
    if len(q) != 1:
        raise InvalidInput(f"{type(mask).__name__} needs a batch of one row, got {len(q)}")
    if starts[0] == starts[1]:
        found: Tensor = attend(q, k, v, Dense(causal), cu_seqlens=torch.tensor(starts[0]), **more)
        return found
    parts = []
    for a, b, c, d in zip(starts[0], starts[0][1:], starts[1], starts[1][1:]):
        one = q[:, a:b], k[:, c:d], v[:, c:d]
        aligned = "upper_left" if causal and b - a != d - c else "lower_right"
        parts.append(attend(*one, is_causal=causal, alignment=aligned, **more))
    return torch.cat(parts, 1)
