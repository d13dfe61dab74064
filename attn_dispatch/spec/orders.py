"""Orders that the dispatcher may choose: permutations of the sequence, and of a kernel's visits.

An order of tokens says which position stands at each place. Everything is computed on the pattern's own positions, so
that the result is the same, exactly; what changes is which tokens share a tile.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern

if TYPE_CHECKING:
    from torch import Tensor

NATURAL = "natural"
HILBERT = "hilbert"  #: along the curve through the pattern's grid; a sequence without one is folded into a square
RESIDUE = "residue"  #: tokens that a dilation keeps together, together
TOKEN_ORDERS = (NATURAL, HILBERT, RESIDUE)

# Of visits, tokens staying where they are: which tiles of rows run side by side, and at which end each begins. In all
# of them every other round of tiles goes backwards, and meets first what the round before has left in the cache.
SAWTOOTH = "sawtooth"  #: head by head
GROUPED = "grouped"  #: as many heads side by side as the cache holds the keys and values of
HILBERT_VISITS = "hilbert_visits"  #: those heads, along the curve through tiles and heads
VISIT_ORDERS = (SAWTOOTH, GROUPED, HILBERT_VISITS)

ORDERS = (*TOKEN_ORDERS, *VISIT_ORDERS)

# Of exchanges, where a sequence lies on many ranks: how rows of k and v get to where queries see them.
LOCAL = "local"  #: not at all, since no rank sees another's
RING = "ring"  #: from one peer after the other, while those that are there are worked on
GATHER = "gather"  #: from all peers at once
ULYSSES = "ulysses"  #: all rows of some heads, in exchange for those of the others
EXCHANGES = (LOCAL, RING, GATHER, ULYSSES)


def check(order: object) -> str:
    """The name of an order on one device.

    Raises:
        InvalidInput: there is no such order, or none without other ranks.
    """
    if order not in ORDERS:
        exchange = ": an exchange of rows between ranks, which needs mesh=" if order in EXCHANGES else ""
        raise InvalidInput(f"order must be None or one of {', '.join(map(repr, ORDERS))}, got {order!r}{exchange}")
    return str(order)


def serves(order: str, pattern: Pattern) -> bool:
    """Whether tiles could be fewer in this order than in the natural one; they never are in an order of visits."""
    if order == HILBERT:
        return isinstance(pattern, Neighborhood) and sum(size > 1 for size in pattern.grid) > 1
    if order == RESIDUE:
        return _period(pattern) > 1
    return order == NATURAL


@lru_cache(maxsize=16)
def permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    """The position at each place, int64 [length] on the CPU; None where places are positions. Do not write to it."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    found: Tensor | None = None
    # What is kept may index tensors that need gradients, whatever the mode of the call that asks first.
    with torch.inference_mode(False), torch.device("cpu"), _disable_current_modes():
        if order == HILBERT:
            found = _hilbert(pattern, length)
        elif order == RESIDUE:
            found = _residue(pattern, length)
        return None if found is None or torch.equal(found, torch.arange(length)) else found


def places(permuted: Tensor) -> Tensor:
    """The inverse: the place of each position."""
    import torch

    found = torch.empty_like(permuted)
    found[permuted] = torch.arange(len(permuted), device=permuted.device)
    return found


def _hilbert(pattern: Pattern, length: int) -> Tensor:
    """Residue classes of a dilation never meet: each has a curve of its own."""
    import torch

    from attn_dispatch.spec.hilbert import curve

    if not isinstance(pattern, Neighborhood):
        return _folded(length)
    grid, step = pattern.grid, pattern.dilation
    found = []
    for start in product(*(range(min(e, size)) for e, size in zip(step, grid))):
        members = tuple(-(-(size - x) // e) for size, x, e in zip(grid, start, step))
        rest = curve(members)
        position, stride = torch.zeros_like(rest), 1
        for axis in reversed(range(len(grid))):  # torch.unravel_index would load torch's symbolic mathematics
            position += (rest % members[axis] * step[axis] + start[axis]) * stride
            rest, stride = rest // members[axis], stride * grid[axis]
        found.append(position)
    return torch.cat(found)


def _folded(length: int) -> Tensor:
    """A sequence in rows, as near to a square as may be; places past its end are left out."""
    from attn_dispatch.spec.hilbert import curve

    width = math.isqrt(max(length - 1, 0)) + 1
    found = curve((-(-length // width), width))
    return found[found < length]


def _residue(pattern: Pattern, length: int) -> Tensor | None:
    import torch

    period = _period(pattern)
    if period == 1:
        return None
    positions = torch.arange(length)
    block = min(pattern.segment_lengths) if isinstance(pattern, Dilated) else length
    # Within the shortest segment, so that a longer one still finds its tokens in a few runs.
    key = positions // block * period + positions % block % period
    return key.argsort(stable=True)


def _period(pattern: Pattern) -> int:
    """Tokens after which all dilations have come round; 1 where that is no sooner than the shortest segment ends."""
    if isinstance(pattern, Dilated):
        found = math.lcm(*(min(rate, length) for length, rate in pattern.branches))
        return found if found < min(pattern.segment_lengths) else 1
    if isinstance(pattern, Neighborhood) and len(pattern.grid) == 1:
        return pattern.dilation[0]
    return 1
