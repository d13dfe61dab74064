"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn features i and i + head_dim / 2 of each head by the angle `position * base ** (-2 i / head_dim)`.

    Args:
        x: [batch, len, heads, head_dim], head_dim even.
        positions: [len] or [batch, len], integers.

    Source: Su et al. 2021, RoFormer, section 3.4.2; features are paired as in Llama.
    """
    half = x.shape[-1] // 2
    # Angles in float64: at position 2**24 a float32 angle is off by a radian.
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(x.device)[..., None, None] * rates
    wide = x.double() if x.dtype == torch.float64 else x.float()
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
