"""Errors in the caller's words: other functions have other names for attend()'s arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput


def renamed(function: Callable[..., Any], names: dict[str, str]) -> Callable[..., Any]:
    """The function, whose InvalidInput has other words for these: the longer ones first."""
    words = {" (or layout='bhnd')": "", **names}
    found = re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in sorted(words, reverse=True)))

    def call(*args: Any, **arguments: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **arguments)
        try:
            return function(*args, **arguments)
        except InvalidInput as error:
            error.args = (found.sub(lambda each: words[each[0]], str(error)),)
            raise

    return call


def attend_as(**names: str) -> Callable[..., Any]:
    """attend(), `renamed`."""
    return renamed(lambda *args, **arguments: attend(*args, **arguments), names)


def check_axes(axes: Container[int], shape: str, **given: object) -> None:
    """Raise InvalidInput for what is no tensor with such a number of axes; `shape` says what they are."""
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.is_nested or x.ndim not in axes:
            got = type(x).__name__ if not isinstance(x, Tensor) else "nested" if x.is_nested else list(x.shape)
            raise InvalidInput(f"{name} must be a tensor {shape}, got {got}")
