"""Cases of a product that every run takes: enough for every pair of values of two factors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, cycle, product
from random import Random
from typing import Any

import pytest

Row = tuple[Hashable, ...]
Factors = Mapping[str, Hashable]


def wanted(row: Row, factors: Factors) -> set[Hashable]:
    """Every two factors with their values, and each value of the row."""
    return {*combinations(factors.items(), 2), *enumerate(row)}


def pairwise(
    rows: Sequence[Row], factors: Callable[..., Factors], cost: Callable[..., float] = lambda *row: 0
) -> list[Row]:
    """Few of the rows, in their order, with each value, and each pair of factors' values, that some row has.

    Greedy: the next one has the most of them that no chosen row has; of several, the cheapest; of these one that is
    drawn, so that no value is chosen more often because it is listed first. The same rows give the same choice in every
    process.

    Args:
        factors: of a row, from its values.
        cost: of a row, in any unit.
    """
    missing = [wanted(row, factors(*row)) for row in rows]
    covered: set[Hashable] = set()
    chosen = []
    places = [(cost(*row), place) for row, place in zip(rows, _shuffled(len(rows)))]
    heap = [(-len(each), place, number) for number, (place, each) in enumerate(zip(places, missing))]
    heapify(heap)
    while heap:
        gain, place, number = heappop(heap)
        missing[number] -= covered
        if -gain != len(missing[number]):  # others were chosen since it was counted
            heappush(heap, (-len(missing[number]), place, number))
        elif gain:
            covered |= missing[number]
            chosen.append(number)
        else:
            break
    return [rows[number] for number in sorted(chosen)]


def _shuffled(count: int) -> list[int]:
    return Random(0).sample(range(count), count)


def parameters(
    rows: Iterable[Row],
    factors: Callable[..., Factors],
    cost: Callable[..., float] = lambda *row: 0,
    too_slow: Callable[..., bool] = lambda *row: False,
) -> list[Any]:
    """For `pytest.mark.parametrize`: every row; those that `pairwise` leaves out, or that take too long to be chosen
    from, marked for `--rest` or `--all` alone.
    """
    every = list(rows)
    chosen = set(pairwise([row for row in every if not too_slow(*row)], factors, cost))
    # `--rest` takes every second one: in most of these grids the pairs that every run takes find what there is.
    marks = cycle((pytest.mark.full, pytest.mark.exhaustive))
    return [
        pytest.param(*row, id="-".join(map(_name, row)), marks=() if row in chosen else next(marks)) for row in every
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
    """Parametrize a test by all of these rows, as `pytest.mark.parametrize` does: every run takes each `step`-th, the
    others are marked for `--all` alone.
    """
    every = [
        pytest.param(*([row] if isinstance(names, str) else row), marks=pytest.mark.full if number % step else ())
        for number, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, every, ids=ids)


def chosen(found: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The rows of these parameters that every run takes."""
    return [each.values for each in found if not each.marks]


def _name(value: object) -> str:
    return str(getattr(value, "id", getattr(value, "__name__", value)))
