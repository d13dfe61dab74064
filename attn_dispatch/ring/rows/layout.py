"""How a sequence is split over ranks: the positions of each rank. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import reals

CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"  #: an early chunk and a late one for each rank, which balances causal work
KINDS = (CONTIGUOUS, ZIGZAG)


@dataclass(frozen=True)
class Layout:
    """The positions of each rank.

    Args:
        lengths: tokens of each rank.
        kind: "contiguous": one run each, in the order of ranks. "zigzag": two runs each; the first halves in the order
            of ranks, and after them the second halves in the opposite order.
    """

    lengths: tuple[int, ...]
    kind: str = CONTIGUOUS

    @property
    def ranks(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def chunks(self) -> tuple[tuple[range, ...], ...]:
        """The runs of positions of each rank, in the order of its shard."""
        if self.kind == CONTIGUOUS:
            return tuple((run,) for run in _runs(self.lengths, 0))
        early = tuple(-(-length // 2) for length in self.lengths)
        late = tuple(length // 2 for length in self.lengths)
        first = _runs(early, 0)
        second = _runs(late[::-1], sum(early))[::-1]
        return tuple(tuple(run for run in pair if run) for pair in zip(first, second))


def deal(tokens: int, ranks: int, weights: Sequence[float] | None = None, multiple_of: int = 1) -> tuple[int, ...]:
    """Lengths of the ranks' shards.

    Args:
        tokens: the whole sequence.
        weights: proportions of the lengths; equal by default.
        multiple_of: lengths are multiples of this, except that the last rank also gets the remainder.

    Raises:
        InvalidInput: a rank would be left without a token.
    """
    shares = [1.0] * ranks if weights is None else reals(weights)
    if len(shares) != ranks or not all(0 < share < float("inf") for share in shares):
        raise InvalidInput(f"weights must be {ranks} positive numbers, one for each rank, got {weights!r}")
    shares = [share / max(shares) for share in shares]  # whose sum is finite
    units, rest = divmod(tokens, multiple_of)
    exact = [units * share / sum(shares) for share in shares]
    found = [int(share) for share in exact]
    # The largest remainders first; of equal ones the lower ranks.
    by_remainder = sorted(range(ranks), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in by_remainder[: units - sum(found)]:
        found[rank] += 1
    lengths = [share * multiple_of for share in found]
    lengths[-1] += rest
    if min(lengths) < 1:
        each = f" in multiples of {multiple_of}" if multiple_of > 1 else ""
        raise InvalidInput(f"{tokens} tokens over {ranks} ranks{each} leave rank {lengths.index(min(lengths))} none")
    return tuple(lengths)


def _runs(lengths: Sequence[int], start: int) -> list[range]:
    return [range(a, b) for a, b in pairwise(accumulate(lengths, initial=start))]
