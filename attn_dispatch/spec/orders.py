"""Orders that the dispatcher may choose: token orders, orders of a kernel's visits, and exchanges between ranks.

A token order gives the position of the token at each place. Patterns are evaluated at the tokens' own positions, so
that the attended keys are exactly the same; only which tokens share a tile changes.
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
RESIDUE = "residue"  #: tokens of the same residue modulo the dilation side by side
TOKEN_ORDERS = (NATURAL, HILBERT, RESIDUE)

# Visit orders leave tokens in place. They set which tiles of rows run side by side, and at which end each begins: every
# other round of tiles runs backwards, and first reads what the previous round left in the cache.
SAWTOOTH = "sawtooth"  #: head by head
GROUPED = "grouped"  #: side by side as many heads as have keys and values that fit the cache
HILBERT_VISITS = "hilbert_visits"  #: the heads of GROUPED, along the curve through tiles and heads
VISIT_ORDERS = (SAWTOOTH, GROUPED, HILBERT_VISITS)

ORDERS = (*TOKEN_ORDERS, *VISIT_ORDERS)

# Exchanges, for a sequence sharded over ranks: how rows of k and v are sent to the ranks whose queries see them.
LOCAL = "local"  #: none: no rank sees another rank's rows
RING = "ring"  #: from one peer after another, while rows that have arrived are computed
GATHER = "gather"  #: from all peers at once
EXCHANGES = (LOCAL, RING, GATHER)


def check(order: object) -> str:
    """Check the name of an order on one device, and return it.

    Raises:
        InvalidInput: no order has this name, or it is an exchange between ranks.
    """
    if order not in ORDERS:
        exchange = ": an exchange of rows between ranks, which needs mesh=" if order in EXCHANGES else ""
        raise InvalidInput(f"order must be None or one of {', '.join(map(repr, ORDERS))}, got {order!r}{exchange}")
    return str(order)


def serves(order: str, pattern: Pattern) -> bool:
    """Whether fewer tiles may be computed in this order than in natural order; never in a visit order."""
    if order == HILBERT:
        return isinstance(pattern, Neighborhood) and sum(size > 1 for size in pattern.grid) > 1
    if order == RESIDUE:
        return _period(pattern) > 1
    return order == NATURAL


def permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    """The position at each place, int64 [length] on the CPU; None for natural order. Do not write to it."""
    found = _permutation(order, pattern, length)
    if found is None:
        return None
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from attn_dispatch.spec import tracing

    if not tracing.graphed():
        return found
    # A graph that is traced with fake tensors takes no tensor made outside of it.
    with _disable_current_modes():
        values = found.tolist()
    return torch.tensor(values, device="cpu")


def permutation_of_queries(order: str, pattern: Pattern, q_len: int, k_len: int) -> Tensor | None:
    """The query at each place, likewise: the last `q_len` tokens of `k_len`, where those are more."""
    found = permutation(order, pattern, max(q_len, k_len))
    if found is None or q_len >= k_len:
        return found
    return found[found >= k_len - q_len] - (k_len - q_len)


@lru_cache(maxsize=16)
def same_permutation(order: str, pattern: Pattern, other: Pattern, length: int) -> bool:
    """Whether both patterns give the same permutation."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        one, two = (_permutation(order, each, length) for each in (pattern, other))
        return one is two if one is None or two is None else torch.equal(one, two)


@lru_cache(maxsize=16)
def _permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    found: Tensor | None = None
    # The cached tensor may index tensors that need gradients, in whatever mode the first call is.
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
    """A curve for each residue class of a dilation: tokens of different classes do not attend to each other."""
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
    """The curve through the sequence in rows, as close to a square as possible; places past its end are skipped."""
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
    # Within the shortest segment, so that the tokens of a longer one lie in few runs.
    key = positions // block * period + positions % block % period
    return key.argsort(stable=True)


def _period(pattern: Pattern) -> int:
    """The least common multiple of all dilations, in tokens; 1 where the shortest segment is not longer."""
    if isinstance(pattern, Dilated):
        found = math.lcm(*(min(rate, length) for length, rate in pattern.branches))
        return found if found < min(pattern.segment_lengths) else 1
    if isinstance(pattern, Neighborhood) and len(pattern.grid) == 1:
        return pattern.dilation[0]
    return 1
