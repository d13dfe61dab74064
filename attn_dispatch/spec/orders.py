"""Orders that the dispatcher may choose: token orders, and exchanges between ranks; and patterns on reordered tokens.

A token order gives the position of the token at each place. Patterns are evaluated at the tokens' own positions, so
that the attended keys are exactly the same; only which tokens share a tile changes.

A model may permute its tokens once, at input and output:

x = to_order(x, "hilbert", grid)  # and every other tensor with one entry per token
... attend(q, k, v, Reordered(grid, "hilbert")) in every layer ...
x = from_order(x, "hilbert", grid)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import axis_of
from attn_dispatch.spec.checks import length as token_count
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.reach import Offsets, Reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NATURAL = "natural"
HILBERT = "hilbert"  #: along the curve through the pattern's grid; a sequence without one is folded into a square
RESIDUE = "residue"  #: tokens of the same residue modulo the dilation side by side
ORDERS = (NATURAL, HILBERT, RESIDUE)

# Exchanges, for a sequence sharded over ranks: how rows of k and v are sent to the ranks whose queries see them.
LOCAL = "local"  #: none: no rank sees another rank's rows
RING = "ring"  #: from one peer after another, while rows that have arrived are computed
GATHER = "gather"  #: from all peers at once
ULYSSES = "ulysses"  #: all tokens of some heads, for those of the others
EXCHANGES = (LOCAL, RING, GATHER, ULYSSES)


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
    """Whether fewer tiles may be computed in this order than in natural order."""
    if order == HILBERT:
        return sum(axis.size > 1 for axis in pattern.axes) > 1
    if order == RESIDUE:
        return _period(pattern) > 1
    return order == NATURAL


def permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    """The position at each place, int64 [length] on the CPU; None for natural order. Do not write to it."""
    found = None if order == NATURAL else _permutation(order, pattern, length)
    if found is None:
        return None
    import torch

    from attn_dispatch.private import without_modes
    from attn_dispatch.spec import tracing

    if not tracing.graphed():
        return found
    # A graph that is traced with fake tensors takes no tensor made outside of it.
    with without_modes():
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

    from attn_dispatch.private import without_modes

    with without_modes():
        one, two = (_permutation(order, each, length) for each in (pattern, other))
        return one is two if one is None or two is None else torch.equal(one, two)


@lru_cache(maxsize=16)
def _permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    import torch

    from attn_dispatch.private import without_modes

    found: Tensor | None = None
    # The cached tensor may index tensors that need gradients, in whatever mode the first call is.
    with torch.inference_mode(False), torch.device("cpu"), without_modes():
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

    if not pattern.axes:
        return _folded(length)
    grid, step = zip(*((axis.size, axis.dilation) for axis in pattern.axes))
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
    block = min((w for w, _ in pattern.branches), default=length)
    # Within the shortest segment, so that the tokens of a longer one lie in few runs.
    key = positions // block * period + positions % block % period
    return key.argsort(stable=True)


def _period(pattern: Pattern) -> int:
    """The least common multiple of all dilations, in tokens; 1 where the shortest segment is not longer."""
    if pattern.branches:
        found = math.lcm(*(min(rate, length) for length, rate in pattern.branches))
        return found if found < min(length for length, _ in pattern.branches) else 1
    return pattern.axes[0].dilation if len(pattern.axes) == 1 else 1


# --- tokens that the caller stores in another order -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reordered(Pattern):
    """A pattern on q, k, v, out and lse whose tokens the caller stores in another order.

    Query and key at places i and j are those at positions p[i] and p[j] of the wrapped pattern, with p =
    `positions(order, pattern, length)`. `seq_lens` and `key_mask` go by place in the tensors.

    Args:
        pattern: what is computed, in natural order.
        order: "hilbert", "residue" or "natural".
    """

    pattern: Pattern
    order: str

    def __post_init__(self) -> None:
        _check(self.order, self.pattern)

    @property
    def natural(self) -> Pattern:
        return self.pattern

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        at = permutation(self.order, self.pattern, q_len)
        if at is not None:
            at = at.to(q_pos.device)
            q_pos, k_pos = at[q_pos], at[k_pos]
        return self.pattern._counts(q_pos, k_pos, q_len, k_len, heads, h_pos)

    def head_offsets(self, head: int, heads: int) -> Offsets:
        return self.pattern.head_offsets(head, heads)

    def reaches(self, queries: Tensor, keys: Tensor, q_len: int, k_len: int, offsets: Offsets) -> list[Reach]:
        at = permutation(self.order, self.pattern, q_len)
        if at is not None:
            queries, keys = at.to(queries.device)[queries], at.to(keys.device)[keys]
        return self.pattern.reaches(queries, keys, q_len, k_len, offsets)

    def lengthened(self, length: int, longer: int) -> None:
        return None

    def check(self, q_len: int, k_len: int) -> None:
        self.pattern.check(q_len, k_len)
        if q_len != k_len:
            raise InvalidInput(f"Reordered needs q_len == k_len, got {q_len} and {k_len}")

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        plain = self.pattern.simplify(q_len, k_len, heads)
        if plain == Dense() or permutation(self.order, self.pattern, q_len) is None:
            return plain
        # The order depends on the pattern: the simplified one may give another permutation.
        return Reordered(plain, self.order) if same_permutation(self.order, self.pattern, plain, q_len) else self

    def of_heads(self, first_head: int, all_heads: int) -> Pattern:
        return Reordered(self.pattern.of_heads(first_head, all_heads), self.order)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "Reordered", "pattern": self.pattern.to_dict(), "order": self.order}

    def __str__(self) -> str:
        return f"Reordered({self.pattern}, {self.order})"


def token_order_of(pattern: Pattern) -> str:
    """The order in which the caller stores the tokens of `pattern.natural`."""
    return pattern.order if isinstance(pattern, Reordered) else NATURAL


def to_order(x: Tensor, order: str, pattern: Pattern, dim: int = 1) -> Tensor:
    """Permute tokens from natural order into another.

    Args:
        x: any shape, with the tokens along `dim`; gradients pass through.
        pattern: in natural order; its grid or its rates define the permutation.

    Returns:
        A copy, or x itself where the order is natural.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    at = _of_tokens(x, order, pattern, dim)
    return x if at is None else x.index_select(dim, at.to(x.device))


def from_order(x: Tensor, order: str, pattern: Pattern, dim: int = 1) -> Tensor:
    """Undo `to_order`: permute tokens back into natural order. Takes the same arguments."""
    at = _of_tokens(x, order, pattern, dim)
    return x if at is None else x.index_select(dim, places(at).to(x.device))


def positions(order: str, pattern: Pattern, length: int) -> Tensor:
    """The natural position of the token at each place, int64 [length] on the CPU; needed by rotary embeddings and the
    like.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    import torch

    length = token_count(length)
    at = _checked_permutation(order, pattern, length)
    return torch.arange(length) if at is None else at.clone()


def _of_tokens(x: Tensor, order: str, pattern: Pattern, dim: int) -> Tensor | None:
    axis = axis_of(x, dim)
    return _checked_permutation(order, pattern, x.shape[axis])


def _checked_permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    _check(order, pattern)
    pattern.check(length, length)
    return permutation(order, pattern, length)


def _check(order: object, pattern: object) -> None:
    if not isinstance(pattern, Pattern) or isinstance(pattern, Reordered):
        raise InvalidInput(f"pattern must be a pattern in natural order, got {pattern!r}")
    if pattern.holds_data:
        raise InvalidInput(f"pattern must hold no tensors, which go by the natural order, got {pattern!r}")
    if order not in ORDERS:
        raise InvalidInput(f"order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
