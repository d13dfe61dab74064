"""Checks of a pattern's fields: each raises InvalidInput with the field, what it was and what it may be."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import SupportsIndex, TypeVar

from attn_dispatch.errors import InvalidInput

T = TypeVar("T")


def integer(name: str, value: object, minimum: int, kind: str = "an integer") -> int:
    if type(value) is int and value >= minimum:
        return value
    if type(value).__name__ == "SymInt" and value >= minimum:  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
        return value  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
    # bool is an int to Python, and True as a length is always a mistake.
    if not isinstance(value, bool) and isinstance(value, SupportsIndex):
        # Arrays and tensors have the method whether or not they hold one integer.
        with suppress(TypeError):
            number = operator.index(value)
            if number >= minimum:
                return number
    raise InvalidInput(f"{name} must be {kind} >= {minimum}, got {value!r}")


def integers(name: str, value: object) -> tuple[int, ...]:
    items: tuple[object, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        with suppress(TypeError):  # of an array without axes
            items = tuple(value)
    if not items:
        raise InvalidInput(f"{name} must hold at least one integer, got {value!r}")
    return tuple(integer(name, item, 1, "integers") for item in items)


def ascending(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """`sorted(pairs)`, also of integers that are symbolic, by comparisons that a graph can hold."""
    found: list[tuple[int, int]] = []
    for first, second in pairs:
        place = len(found)
        while place and (
            first < found[place - 1][0] or (first == found[place - 1][0] and second < found[place - 1][1])
        ):
            place -= 1
        found.insert(place, (first, second))
    return found


def per_axis(name: str, value: tuple[T, ...], axes: int) -> tuple[T, ...]:
    if len(value) == 1:
        return value * axes
    if len(value) != axes:
        raise InvalidInput(f"{name} has {len(value)} entries, but grid has {axes} axes: give one, or one for each")
    return value


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}")


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
