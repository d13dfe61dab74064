"""Errors in the caller's words: InvalidInput names attend()'s arguments, which other functions call otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput

P = ParamSpec("P")
T = TypeVar("T")
#: Of attend() alone: no other function has a layout to give instead.
_ALONE = {" (or layout='bhnd')": ""}


def renamed(function: Callable[P, T], names: dict[str, str]) -> Callable[P, T]:
    """The function, whose InvalidInput has other words for these: names of arguments, and what stands beside them."""
    words = _ALONE | names
    found = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(words, key=len, reverse=True)))

    def call(*args: P.args, **arguments: P.kwargs) -> T:
        if is_dynamo_compiling():
            return function(*args, **arguments)
        try:
            return function(*args, **arguments)
        except InvalidInput as error:
            error.args = (found.sub(lambda word: words[word[0]], str(error)),)
            raise

    return call


def attend_as(names: dict[str, str]) -> Callable[..., Any]:
    """attend(), `renamed`."""
    return renamed(lambda *args, **arguments: attend(*args, **arguments), names)


def check_axes(axes: Container[int], shape: str, **given: object) -> None:
    """Raise InvalidInput for what is no dense tensor with such a number of axes; `shape` says what they are."""
    for name, x in given.items():
        if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
            got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise InvalidInput(f"{name} must be a dense strided tensor, got {got}")
        if not isinstance(x, Tensor) or x.ndim not in axes:
            got = str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor {shape}, got {got}")
