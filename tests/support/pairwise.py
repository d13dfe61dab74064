"""Few cases of a product: with every pair of values for all runs, with every three for `--rest`, and no others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

Row = tuple[Hashable, ...]
Factors = Mapping[str, Hashable]


def wanted(row: Row, factors: Factors, size: int = 2) -> set[Hashable]:
    """Every `size` factors with their values, and each value of the row."""
    return {*combinations(factors.items(), size), *enumerate(row)}


def covering(
    rows: Sequence[Row],
    factors: Callable[..., Factors],
    cost: Callable[..., float] = lambda *row: 0,
    size: int = 2,
    before: Iterable[Row] = (),
) -> set[Row]:
    """Few of the rows that, with those chosen before, have all that is `wanted` of any.

    Greedy: the next one has the most of it that no chosen row has; of several, the cheapest; of these one that is
    drawn, so that no value is chosen more often because it is listed first. The same rows give the same choice in
    every process.

    Args:
        factors: of a row, from its values.
        cost: of a row, in any unit.
    """
    missing = [wanted(row, factors(*row), size) for row in rows]
    covered = set[Hashable]().union(*(wanted(row, factors(*row), size) for row in before))
    places = Random(0).sample(range(len(rows)), len(rows))
    heap = [(-len(missing[n]), cost(*row), places[n], n) for n, row in enumerate(rows)]
    heapify(heap)
    found = set[Row]()
    while heap and heap[0][0]:
        gain, price, place, number = heappop(heap)
        missing[number] -= covered
        if -gain == len(missing[number]):
            covered |= missing[number]
            found.add(rows[number])
        else:  # others were chosen since it was counted
            heappush(heap, (-len(missing[number]), price, place, number))
    return found


def parameters(
    rows: Iterable[Row],
    factors: Callable[..., Factors],
    cost: Callable[..., float] = lambda *row: 0,
    too_slow: Callable[..., bool] = lambda *row: False,
) -> list[Any]:
    """For `pytest.mark.parametrize`: the rows that have every pair of factors, and, marked for `--rest`, those that
    have every three, or that are too slow for the first.
    """
    every = list(rows)
    few = covering([row for row in every if not too_slow(*row)], factors, cost)
    kept = few | covering(every, factors, cost, 3, few)
    return [
        pytest.param(*row, id="-".join(map(_name, row)), marks=() if row in few else pytest.mark.full)
        for row in every
        if row in kept
    ]


def crossed(
    factors: Callable[..., Factors] | None = None,
    too_slow: Callable[..., bool] = lambda *row: False,
    **values: Iterable[Hashable],
) -> pytest.MarkDecorator:
    """Parametrize a test by the product of these values; without `factors`, the values themselves are."""
    each = factors or (lambda *row: dict(zip(values, row)))
    return pytest.mark.parametrize(tuple(values), parameters(product(*values.values()), each, too_slow=too_slow))


def thinned(names: str | tuple[str, ...], rows: Iterable[Any], step: int, ids: Any = None) -> pytest.MarkDecorator:
    """Parametrize a test by all of these rows, as `pytest.mark.parametrize` does: every run takes each `step`-th, and
    the others are left to `--rest`.
    """
    every = [
        pytest.param(*([row] if isinstance(names, str) else row), marks=pytest.mark.full if number % step else ())
        for number, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, every, ids=ids)


def by_turns(
    names: tuple[str, ...], rows: Iterable[Any], values: Sequence[Any], ids: Any = None
) -> pytest.MarkDecorator:
    """Parametrize a test by each row with each value; every run takes one of each row, by turns."""
    each = [row if isinstance(row, tuple) else (row,) for row in rows]
    every = [(*row, values[(n + turn) % len(values)]) for n, row in enumerate(each) for turn in range(len(values))]
    return thinned(names, every, len(values), ids)


def chosen(found: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The rows of these parameters that every run takes."""
    return [each.values for each in found if not each.marks]


def _name(value: object) -> str:
    return str(getattr(value, "id", getattr(value, "__name__", value)))
