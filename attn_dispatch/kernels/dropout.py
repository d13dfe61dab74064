"""Which attention weights a call drops: a pure function of its seed and of positions, the same in both passes.

`manual`, `native` and `triton` draw the same numbers of 16 bits for a query and a key: for 8 neighbouring queries at
once, from the first one's position, the key's position, and the batch row and head. A weight is kept where its
number is not below `threshold`.

Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3: Philox4x32-7, which passes BigCrush.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

from attn_dispatch.machine.devices import KNOWN

NUMBERS = 2**16  #: that may be drawn
DRAWN = 8  #: numbers at once
ROUNDS = 7
#: The seed that an operator was called with: `drawn_seed` returns it, so that both passes drop the same weights.
given_seed: ContextVar[Tensor | None] = ContextVar("given_seed", default=None)
BY_SEED = ("native", "triton", "triton_tiles", "manual")  #: backends that drop by `drawn_seed` and nothing else
FACTORS, WEYL, WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF  #: of Philox4x32


def threshold(p: float) -> int:
    """How many of the numbers drop a weight: `p` in steps of 2**-16."""
    return min(round(p * NUMBERS), NUMBERS - 1)


def gain(p: float) -> float:
    """By what kept weights are multiplied, so that the mean of a weight is what it is without dropout."""
    return NUMBERS / (NUMBERS - threshold(p))


def drawn_seed(device: torch.device) -> Tensor:
    """int64 [1] from torch's generator of the device: checkpointing restores its state, CUDA graphs draw anew."""
    if (seed := given_seed.get()) is not None:
        return seed
    on = device if device.type in KNOWN else "cpu"  # others may have no generator
    return torch.randint(2**62, (1,), dtype=torch.int64, device=on)


def numbers(seed: Tensor, rows: Tensor, first: Tensor, keys: int) -> Tensor:
    """int64 [rows, draws, DRAWN, keys] below NUMBERS, on the seed's device.

    Args:
        rows: int64 [rows], `batch row * heads + head`.
        first: int64 [draws], the position of the first of DRAWN queries.
    """
    x0, x1 = first[None, :, None], torch.arange(keys, device=seed.device)
    x2, x3 = rows[:, None, None], torch.zeros((), dtype=torch.int64, device=seed.device)
    for number in range(ROUNDS):
        low, high = ((half + number * step) & WORD for half, step in zip((seed & WORD, seed >> 32), WEYL))
        a, b = x0 * FACTORS[0], x2 * FACTORS[1]  # 64 bits, whatever their sign
        x0, x1, x2, x3 = (b >> 32 & WORD) ^ x1 ^ low, b & WORD, (a >> 32 & WORD) ^ x3 ^ high, a & WORD
    return torch.stack([half for x in (x1, x0, x3, x2) for half in (x & 0xFFFF, x >> 16)], dim=2)


def kept(seed: Tensor, p: float, rows: Tensor, first: Tensor, keys: int) -> Tensor:
    """Bool [rows, draws * DRAWN, keys]: which weights of these queries are kept; arguments as of `numbers`."""
    return (numbers(seed, rows, first, keys) >= threshold(p)).flatten(1, 2)
