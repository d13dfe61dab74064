"""NATTEN's neighborhood attention, on any device that attend() has a backend for.

Source of the interface: SHI-Labs/NATTEN, natten/functional.py of 0.21.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.compat.names import attend_as, check_axes, renamed
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.numerics import merge
from attn_dispatch.spec.checks import boolean
from attn_dispatch.spec.pattern import Neighborhood

DOC = """natten.na{axes}d: each query sees its neighbours, and all of the additional keys.

Args:
    query: [batch, {names}, heads, head_dim]. key, value: [batch, {names}, kv_heads, head_dim].
    kernel_size, stride, dilation, is_causal: one for each axis, or one for all.
    scale: factor of the scores; `head_dim ** -0.5` by default.
    additional_keys, additional_values: [batch, tokens, kv_heads, head_dim]; both or none. Two results are then joined,
        each rounded to the inputs' dtype.
    return_lse: return (out, lse); lse is [batch, {names}, heads].

Raises:
    InvalidInput: an argument is wrong.
"""

_attend = attend_as(q="query", k="key", v="value")
_to_more = attend_as(q="query", k="additional_keys", v="additional_values")
_EDGES = {"edges='shift' needs": "NATTEN needs", "window": "kernel_size", "the window": "kernel_size"}
_neighborhood = renamed(Neighborhood, _EDGES)


def _function(axes: int) -> Callable[..., Any]:
    names = ", ".join("xyz"[:axes])

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        is_causal: Any = False,
        scale: float | None = None,
        additional_keys: Tensor | None = None,
        additional_values: Tensor | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        boolean("return_lse", return_lse)
        check_axes((axes + 3,), f"[batch, {names}, heads, head_dim]", query=query, key=key, value=value)
        grid = query.shape[1 : axes + 1]
        if not grid == key.shape[1 : axes + 1] == value.shape[1 : axes + 1]:
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise InvalidInput(f"query, key and value must have the same {names}, got {shapes}")
        if (additional_keys is None) != (additional_values is None):
            raise InvalidInput("additional_keys and additional_values must be given together")
        if isinstance(additional_values, Tensor) and additional_values.shape[-1:] != value.shape[-1:]:
            got = list(additional_values.shape)
            raise InvalidInput(f"additional_values must have value's head_dim {value.shape[-1]}, got {got}")
        q, k, v = (x.flatten(1, axes) for x in (query, key, value))
        window = (kernel_size,) * axes if isinstance(kernel_size, int) else kernel_size
        more: dict[str, Any] = {"dilation": dilation, "is_causal": is_causal, "stride": stride}
        pattern = _neighborhood(tuple(grid), window, edges="shift", **more) if math.prod(grid) else None
        found = _attend(q, k, v, pattern, scale=scale, return_lse=return_lse or additional_keys is not None)
        if additional_keys is not None and additional_values is not None:
            found = merge(*found, *_to_more(q, additional_keys, additional_values, scale=scale, return_lse=True))
        if isinstance(found, Tensor):
            return torch.unflatten(found, 1, grid)
        out, lse = (torch.unflatten(x, 1, grid) for x in (found[0], found[1].transpose(1, 2)))
        return (out, lse) if return_lse else out

    call.__name__ = call.__qualname__ = f"na{axes}d"
    call.__doc__ = DOC.format(axes=axes, names=names)
    return call


na1d, na2d, na3d = map(_function, (1, 2, 3))
