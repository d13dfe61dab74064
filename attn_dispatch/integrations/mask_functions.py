"""Reads a mask function of (batch, head, query, key) by calling it with stand-ins that note what is compared.

Sound: whatever is not modelled here raises. torch.compile traces `read`, and cannot look into closures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Unreadable(TypeError):
    """A mask function does something that is not modelled."""


class Facts(NamedTuple):
    """What a mask demands of a query and a key; all of it.

    Args:
        low, high: bounds of the key's position minus the query's; None: unbounded.
        documents: ids [batch, len], which must be equal.
        chunk: number of positions, and what is subtracted from positions (by row, or 0) before they are divided by it;
            the quotients must be equal.
        within: whether bounds were of positions within documents.
    """

    low: int | None = None
    high: int | None = None
    documents: Tensor | None = None
    chunk: tuple[int, Any] | None = None
    within: bool = False

    @property
    def is_causal(self) -> bool:
        return self.high == 0 and self.low is None

    def joined(self, other: Facts) -> Facts:
        """All of both. Raises Unreadable."""
        if (self.documents is not None and other.documents is not None) or (self.chunk and other.chunk):
            raise Unreadable("two conditions on documents or chunks")
        lows, highs = ([x for x in pair if x is not None] for pair in ((self.low, other.low), (self.high, other.high)))
        documents = other.documents if self.documents is None else self.documents
        bounds = max(lows, default=None), min(highs, default=None)
        return Facts(*bounds, documents, self.chunk or other.chunk, self.within or other.within)


def read(mask_function: Any) -> Facts:
    """The facts of a mask function.

    Raises:
        Unreadable: it is no conjunction of bounds of distances, equal documents and equal chunks.
    """
    try:
        found = mask_function(None, None, _Place("query"), _Place("key"))
    except (TypeError, AttributeError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(found, _All):
        raise Unreadable(f"it returns a {type(found).__name__}")
    if found.facts.within and found.facts.documents is None:
        raise Unreadable("positions of documents, which are not kept apart")
    return found.facts


def readable(packing: Any) -> Any:
    """A maker of mask functions whose last argument, a tensor, torch.compile sees indexed by stand-ins."""
    return lambda *given: packing(*given[:-1], _Indexed(given[-1]))


class _Indexed:
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        return _Place(at[1].of, ids=self.ids) if isinstance(at[1], _Place) else self.ids[at]


class _All:
    """Conditions that all hold."""

    device = "cpu"

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __and__(self, other: Any) -> _All:
        if not isinstance(other, _All):
            raise Unreadable("a condition of another kind")
        return _All(self.facts.joined(other.facts))

    def to(self, *args: Any, **more: Any) -> _All:
        return self


class _Place:
    """Stands in for the position of a query or a key, `by` further on, less a row's `left` padding.

    With `ids`, for what these hold there.
    """

    device = "cpu"

    def __init__(self, of: str, by: int = 0, left: Any = None, ids: Tensor | None = None) -> None:
        self.of, self.by, self.left, self.ids = of, by, left, ids

    def new_ones(self, *args: Any, **more: Any) -> _All:
        return _All(Facts())

    def __add__(self, n: Any) -> _Place:
        if not isinstance(n, int):
            raise Unreadable("positions moved by data")
        return _Place(self.of, self.by + n, self.left, self.ids)

    def __sub__(self, n: Any) -> Any:
        if isinstance(n, _Place):
            return Distance(self, n)
        if isinstance(n, Tensor) and self.left is None:
            return _Place(self.of, self.by, n, self.ids)
        return self + -n

    def __floordiv__(self, n: Any) -> _Chunk:
        return _Chunk(self, n)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, _Place) or self.ids is None or self.ids is not other.ids or self.of == other.of:
            raise Unreadable("positions compared for equality")
        return _All(Facts(documents=self.ids))

    __hash__ = None  # type: ignore[assignment]

    def __le__(self, other: Any) -> _All:
        return _at_most(self, other, 0)

    def __lt__(self, other: Any) -> _All:
        return _at_most(self, other, -1)

    def __ge__(self, other: Any) -> _All:
        if isinstance(other, int) and other == 0 and (self.by, self.left, self.ids) == (0, None, None):
            return _All(Facts())  # a position is at least 0
        return _at_most(other, self, 0)

    def __gt__(self, other: Any) -> _All:
        return _at_most(other, self, -1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            place = args[1][-1]
            if isinstance(place, _Place) and (place.by, place.left, place.ids) == (0, None, None):
                return _Place(place.of, ids=args[0])
        raise Unreadable(f"{function} of a position")


def _at_most(one: Any, other: Any, more: int) -> _All:
    """one <= other + more."""
    places = isinstance(one, _Place) and isinstance(other, _Place)
    if not places or one.left is not None or other.left is not None or one.ids is not other.ids:
        raise Unreadable("a position compared with something else")
    if one.of == other.of:
        raise Unreadable("two positions of one kind")
    # Inside a document positions lie as far apart as in the row.
    within = one.ids is not None
    if one.of == "key":
        return _All(Facts(high=other.by - one.by + more, within=within))
    return _All(Facts(low=one.by - other.by - more, within=within))


class _Chunk:
    def __init__(self, place: _Place, size: Any) -> None:
        self.place, self.size = place, size

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, _Chunk) or not isinstance(self.size, int) or self.size != other.size:
            raise Unreadable("chunks of two sizes")
        mine, more = self.place, other.place
        lefts = (x if isinstance(x, Tensor) else torch.tensor(0) for x in (mine.left, more.left))
        if mine.of == more.of or mine.by != more.by or not torch.equal(*lefts) or mine.ids is not more.ids:
            raise Unreadable("chunks of two kinds")
        left = -mine.by if mine.left is None else mine.left - mine.by
        return _All(Facts(chunk=(self.size, left), within=mine.ids is not None))

    __hash__ = None  # type: ignore[assignment]


class Distance:
    """One position minus another of the other kind; or how far they lie apart."""

    def __init__(self, place: Any, other: Any, is_absolute: bool = False) -> None:
        self.place, self.other, self.is_absolute = place, other, is_absolute

    def __neg__(self) -> Any:
        if self.is_absolute:
            raise Unreadable("a distance below zero")
        return type(self)(self.other, self.place)

    def __abs__(self) -> Any:
        return type(self)(self.place, self.other, True)

    def __le__(self, n: Any) -> Any:
        if not isinstance(n, int):
            raise Unreadable("a distance compared with something else")
        nearer = self.place - n <= self.other
        return nearer & (self.other - n <= self.place) if self.is_absolute else nearer

    def __lt__(self, n: Any) -> Any:
        return self <= n - 1

    def __ge__(self, n: Any) -> Any:
        return ~(self <= n - 1) if self.is_absolute else -self <= -n

    def __gt__(self, n: Any) -> Any:
        return self >= n + 1
