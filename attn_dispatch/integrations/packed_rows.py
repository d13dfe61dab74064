"""Documents of packed rows, by the `position_ids` that a model of transformers is called with: they restart at 0.

transformers itself looks at them where there is neither a mask nor a cache, and many models hand them on to no mask.
"""

from __future__ import annotations

from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.log import say_once

RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}  #: layer types of configs

_positions: ContextVar[Any] = ContextVar("position_ids", default=None)  #: of the model that runs


def noted(self: Any, *args: Any, **given: Any) -> Any:
    """The call of a model of transformers, whose `position_ids` are kept while it runs."""
    run: Any = torch.nn.Module.__call__
    if torch.compiler.is_compiling():
        return run(self, *args, **given)
    every = dict(zip(signature(self.forward).parameters if len(args) > 1 else (), args)) | given
    is_told = getattr(every.get("attention_mask"), "ndim", 0) == 4  # such a mask says itself who sees whom
    token = _positions.set(None if is_told else every.get("position_ids"))
    try:
        return run(self, *args, **given)
    finally:
        _positions.reset(token)


def documents(size: Any, key_mask: Tensor | None, config: Any, first: Any = 0) -> Tensor | None:
    """The documents [batch, len] of the rows that a mask is for; None: they are not packed, or it is said why not.

    Args:
        size: [batch, 1, q_len, k_len] of the mask.
        key_mask: bool [batch, k_len], False for padding, or None.
        config: of the model that asks for the mask.
        first: the key at which the first query stands.
    """
    batch, _, q_len, k_len = size
    positions = None if torch.compiler.is_compiling() or q_len == 1 else _positions.get()
    if not isinstance(positions, Tensor) or positions.ndim < 2 or positions.shape[-2:] not in ((1, q_len), size[::2]):
        return None
    of_axes = positions.reshape(-1, *positions.shape[-2:])
    starts = (of_axes[..., 1:] == 0).all(0).expand(batch, -1)
    back = starts | (of_axes.diff(dim=-1) < 0).all(0)
    if key_mask is not None and first + q_len <= k_len:  # neither padding nor the token after it starts one
        back = back & (key_mask & (key_mask.cumsum(1) > 1))[:, int(first) + 1 : int(first) + q_len]
    if not bool(back.any()) or not bool(positions.any()):  # DecisionTransformer's are all 0
        return None
    if kinds := RECURRENT & set(getattr(config, "layer_types", None) or ()):
        what = f"{' and '.join(sorted(kinds))} layers run over its documents"
        say_once(f"position_ids restart inside a row, but {what}: give each document a row of its own")
    if q_len == k_len and bool((starts | ~back).all()):
        return torch.nn.functional.pad((back & starts).cumsum(1), (1, 0))
    say_once(
        "position_ids go back inside a row, but its documents see each other: let each start at 0, without a cache of "
        "another length, or pass cu_seq_lens_q and cu_seq_lens_k"
    )
    return None
