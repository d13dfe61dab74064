"""Checks of a pattern's fields: each raises InvalidInput with the field, what it was and what it may be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from attn_dispatch.errors import InvalidInput

T = TypeVar("T")
LONGEST = 2**63 - 1  #: tokens, of which positions are int64


def integer(name: str, value: object, minimum: int, kind: str = "an integer") -> int:
    if type(value) is int and value >= minimum:
        return value
    if type(value).__name__ == "SymInt" and value >= minimum:  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
        return value  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
    # bool is an int to Python, and True as a length is always a mistake.
    if not isinstance(value, bool) and isinstance(value, SupportsIndex):
        # Arrays and tensors have the method whether or not they hold one integer that can be read.
        with suppress(TypeError, RuntimeError):
            number = operator.index(value)
            if number >= minimum:
                return number
    raise InvalidInput(f"{name} must be {kind} >= {minimum}, got {value!r}")


def length(value: object) -> int:
    """A number of tokens of which there may be a tensor."""
    found = integer("length", value, 1)
    if found > LONGEST:
        raise InvalidInput(f"length must be an integer from 1 to {LONGEST}, got {value!r}")
    return found


def real(value: object) -> float:
    """A number as a float; NaN, which no comparison accepts, for what is none or too large."""
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        with suppress(OverflowError, RuntimeError, TypeError, ValueError):  # tensors and arrays of several numbers
            return float(value)
    return math.nan


def number(name: str, value: object, fits: Callable[[float], bool], kind: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise InvalidInput(f"{name} must be {kind}, got {value!r}")
    return float(value)


def reals(values: object) -> list[float]:
    """`real` of each; empty for what holds no numbers."""
    with suppress(TypeError):  # of a tensor without axes
        return [real(value) for value in values] if isinstance(values, Iterable) else []
    return []


def integers(name: str, value: object) -> tuple[int, ...]:
    items: tuple[object, ...] = (value,)
    if isinstance(value, (tuple, list)):  # without a context, which torch 2.6 does not compile
        items = tuple(value)
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
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


def neighborhood(
    grid: object, window: object, dilation: object, is_causal: object, edges: str, stride: object
) -> dict[str, tuple[int, ...]]:
    """The fields of a neighbourhood by name, with an entry for each axis."""
    sizes = integers("grid", grid)
    if len(sizes) > 3:
        raise InvalidInput(f"grid has {len(sizes)} axes, but may have 1 to 3: {sizes}")
    choice("edges", edges, ("clip", "shift"))
    widths = per_axis("window", integers("window", window), len(sizes))
    steps = per_axis("dilation", integers("dilation", dilation), len(sizes))
    flags: Any = tuple(is_causal) if isinstance(is_causal, (tuple, list)) else (is_causal,)
    for flag in flags:
        boolean("is_causal", flag)
    causal = per_axis("is_causal", flags, len(sizes))
    strides = per_axis("stride", integers("stride", stride), len(sizes))
    for size, width, step, shared in zip(sizes, widths, steps, strides):
        if edges == "clip":
            if width % 2 == 0:
                raise InvalidInput(f"window must be odd on every axis, got {widths}: even ones need edges='shift'")
            if shared != 1:
                raise InvalidInput(f"stride must be 1 on every axis, got {strides}: others need edges='shift'")
        elif width * step > size:
            needs = "edges='shift' needs window * dilation <= grid on every axis"
            raise InvalidInput(f"{needs}, got {width} * {step} > {size}")
        elif shared > width:
            raise InvalidInput(f"stride must be from 1 to the window on every axis, got {shared} > {width}")
    if edges == "clip":
        # A clipped window stays inside its residue class, so wider windows are equivalent.
        widths = tuple(min(w, 2 * -(-size // e) - 1) for size, w, e in zip(sizes, widths, steps))
    return {"grid": sizes, "window": widths, "dilation": steps, "is_causal": causal, "stride": strides}


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}")


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def axis_of(x: object, dim: object) -> int:
    """The axis `dim` of a tensor, counted from its first one."""
    from torch import Tensor

    if not isinstance(x, Tensor):
        raise InvalidInput(f"x must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InvalidInput(f"dim must be an axis of x, which has {x.ndim}, got {dim!r}")
    return dim % x.ndim
