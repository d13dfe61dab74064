"""xFormers' memory_efficient_attention, on any device that attend() has a backend for.

Source of the interface: facebookresearch/xformers, xformers/ops/fmha of 0.0.35.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.compat.names import attend_as, renamed
from attn_dispatch.compat.sequences import borders, sequences
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Window

_RULES: dict[str, Callable[[Any], Dense | Window]] = {
    "dense": lambda mask: Dense(),
    "causal": lambda mask: Dense(is_causal=True),
    "local": lambda mask: Window(mask._window_size - 1, 0),
    "window": lambda mask: Window(mask.window_left, mask.window_right),
}
#: Of the masks by name: the rule for the pattern, of whole tensors or of each block; whether first queries and keys
#: are aligned, else the last.
_MASKS: dict[str, tuple[str, bool]] = {
    "NoneType": ("dense", False),
    "LowerTriangularMask": ("causal", True),
    "LowerTriangularMaskWithTensorBias": ("causal", True),
    "LowerTriangularFromBottomRightMask": ("causal", False),
    "LowerTriangularFromBottomRightLocalAttentionMask": ("local", False),
    "LocalAttentionFromBottomRightMask": ("window", False),
    "BlockDiagonalMask": ("dense", False),
    "BlockDiagonalCausalMask": ("causal", True),
    "BlockDiagonalCausalFromBottomRightMask": ("causal", False),
    "BlockDiagonalCausalLocalAttentionMask": ("local", True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ("local", False),
    "BlockDiagonalPaddedKeysMask": ("dense", False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("causal", False),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("window", False),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("local", False),
    "BlockDiagonalGappyKeysMask": ("dense", False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ("causal", False),
}

_WORDS = {"q": "query", "k": "key", "v": "value", "bias": "attn_bias", "dropout_p": "p"}
_run, _sequences = attend_as(**_WORDS), renamed(sequences, _WORDS)


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
            scores, or one of xFormers' masks, each aligned as there: all but those with pages of keys.
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
        out = _run(q, k, v, bias=bias, **more)
    elif kind not in _MASKS:
        raise InvalidInput(f"attn_bias must be None, a tensor or one of {', '.join(_MASKS)}, got {kind}")
    elif kind.startswith("BlockDiagonal"):
        out = _of_blocks(q, k, v, attn_bias, more)
    else:
        more["bias"] = getattr(attn_bias, "_bias", None)
        out = _attend(q, k, v, attn_bias, more)
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


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, more: dict[str, Any]) -> Tensor:
    rule, upper_left = _MASKS[type(mask).__name__]
    # The usual alignment is quicker where it is the same.
    aligned: dict[str, Any] = {"alignment": "upper_left"} if upper_left and q.shape[1] != k.shape[1] else {}
    found: Tensor = _run(q, k, v, _RULES[rule](mask), **aligned, **more)
    return found


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Any, more: dict[str, Any]) -> Tensor:
    """Sequences one after the other, of which the keys may have space after them."""
    if len(q) != 1:
        raise InvalidInput(f"{type(mask).__name__} needs a batch of one row, got {len(q)}")
    names = "attn_bias.q_seqinfo", "attn_bias.k_seqinfo"
    of_q, seqinfo = borders(names[0], list(mask.q_seqinfo.seqstart_py), q.shape[1]), mask.k_seqinfo
    if hasattr(seqinfo, "seqlen_py"):  # anywhere
        of_k = [(start, start + length) for start, length in zip(seqinfo.seqstart_py, seqinfo.seqlen_py)]
        if not all(0 <= start <= end <= k.shape[1] for start, end in of_k):
            raise InvalidInput(f"{names[1]} must lie in 0..{k.shape[1]}, got {of_k[:8]}")
    else:
        of_k = borders(names[1], list(seqinfo.seqstart_py), k.shape[1])
    parts = _sequences(q, k, v, names, of_q, of_k)
    if of_q == of_k and of_q[-1][1] == k.shape[1]:
        starts = torch.tensor([0, *(end for _, end in of_q)])
        return _attend(q, k, v, mask, {**more, "cu_seqlens": starts})
    return torch.cat([_attend(q, k, v, mask, more) for q, k, v in parts], 1)
