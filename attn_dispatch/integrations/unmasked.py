"""What a layer's call means where a wrapper of attention functions has dropped its mask.

DeepSpeed's sequence parallelism for transformers (ALST) and accelerate's hooks for context_parallel do: then packed
rows are told by positions alone, chunks and dilated segments by the config, and a layer may have a share of the heads.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern

SEQUENCE_PARALLEL = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
CHUNKS = "chunked_attention"  #: a layer type of transformers' configs


def pattern_of(module: Any, pattern: Pattern, spread: Any) -> Pattern:
    """The pattern of a causal layer without a mask: chunks and dilated segments as its config has them.

    Args:
        spread: the config's `attn_dispatch`, or None.
    """
    if pattern != Dense(is_causal=True):
        return pattern
    config: Any = getattr(module, "config", None)
    layer, kinds = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    if kinds is not None and layer is not None and kinds[layer] == CHUNKS:
        return Dilated((config.attention_chunk_size,), (1,), is_causal=True)
    return dilated(spread) if spread else pattern


def dilated(spread: Any) -> Dilated:
    """The causal pattern of a config's `attn_dispatch`.

    Raises:
        InvalidInput: it is not a dict of the fields of `Dilated`.
    """
    try:
        return Dilated(**spread, is_causal=True)
    except TypeError as error:
        what = "a dict of segment_lengths and dilation_rates, perhaps of offsets and heads"
        raise InvalidInput(f"config.attn_dispatch must be {what}, got {spread!r}") from error


def is_checked_over_ranks(positions: Any, length: int) -> bool:
    """Whether a call is inside torch's context_parallel; then the positions are those of this rank's tokens.

    Raises:
        InvalidInput: they are others: those of packed rows, which cannot be kept apart there, or counted by each rank
            from 0, so that the model's own embedding of positions is wrong.
    """
    over_ranks = tracing.context_parallel()
    if over_ranks is None:
        return False
    if is_of_rows(positions, length):
        rank, size = over_ranks.mesh.get_local_rank(), over_ranks.mesh.size()
        parts = (rank, 2 * size - 1 - rank) if over_ranks.balanced else (rank,)
        each = length // len(parts)
        here = torch.cat([torch.arange(part * each, (part + 1) * each) for part in parts]).to(positions.device)
        if not bool((positions == here).all()):
            what = "inside context_parallel position_ids must be those of this rank's tokens in one whole sequence"
            raise InvalidInput(f"{what}: pass them to the model, and to context_parallel as a buffer")
    return True


def is_wrapped() -> bool:
    """Whether masks are dropped by what makes sequences parallel."""
    shares: Any = sys.modules.get(SEQUENCE_PARALLEL)
    return tracing.context_parallel() is not None or getattr(shares, "_SEQUENCE_PARALLEL_GROUP", None) is not None


def is_of_rows(positions: Any, length: int) -> bool:
    """Whether positions are those of rows of several tokens."""
    return isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == length > 1


def heads_of(module: Any, heads: int, pattern: Pattern) -> dict[str, int]:
    """attend()'s `first_head` and `all_heads` of a layer that was handed a share of the heads, where the pattern
    differs by head.

    Raises:
        InvalidInput: it is not known which heads these are.
    """
    total = getattr(getattr(module, "config", None), "num_attention_heads", heads)
    if heads == total or not differs_by_head(pattern):
        return {}
    shares: Any = sys.modules.get(SEQUENCE_PARALLEL)
    group = getattr(shares, "_SEQUENCE_PARALLEL_GROUP", None)
    if shares is None or group is None or shares.get_sequence_parallel_world_size() * heads != total:
        raise InvalidInput(f"{pattern} differs by head, but the layer has {heads} of {total} heads, not known which")
    return {"first_head": shares.get_sequence_parallel_rank() * heads, "all_heads": total}


def differs_by_head(pattern: Pattern | None) -> bool:
    """Whether heads may see different keys."""
    natural = None if pattern is None else pattern.natural
    if not isinstance(natural, Dilated):
        return False
    return max(natural.dilation_rates) > 1 or (natural.heads == "split" and len(natural.branches) > 1)
