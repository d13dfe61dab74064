"""Patterns on tokens that the caller stores in another order: a model permutes its tokens once, at input and output.

x = to_order(x, "hilbert", grid)  # and every other tensor with one entry per token
... attend(q, k, v, Reordered(grid, "hilbert")) in every layer ...
x = from_order(x, "hilbert", grid)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import checks
from attn_dispatch.spec.orders import NATURAL, TOKEN_ORDERS, permutation, places, same_permutation
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.reach import Offsets, Reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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

    length = checks.length(length)
    at = _permutation(order, pattern, length)
    return torch.arange(length) if at is None else at.clone()


def _of_tokens(x: Tensor, order: str, pattern: Pattern, dim: int) -> Tensor | None:
    import torch

    if not isinstance(x, torch.Tensor):
        raise InvalidInput(f"x must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InvalidInput(f"dim must be an axis of x, which has {x.ndim}, got {dim!r}")
    return _permutation(order, pattern, x.shape[dim])


def _permutation(order: str, pattern: Pattern, length: int) -> Tensor | None:
    _check(order, pattern)
    pattern.check(length, length)
    return permutation(order, pattern, length)


def _check(order: object, pattern: object) -> None:
    if not isinstance(pattern, Pattern) or isinstance(pattern, Reordered):
        raise InvalidInput(f"pattern must be a pattern in natural order, got {pattern!r}")
    if order not in TOKEN_ORDERS:
        raise InvalidInput(f"order must be one of {', '.join(map(repr, TOKEN_ORDERS))}, got {order!r}")
