"""Comparison of q, k and v with those of a cached route: most of the time of a hit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import private
from attn_dispatch.errors import NoBackend
from attn_dispatch.private import is_fake
from attn_dispatch.spec.tensors import autocast_dtype

Fits = Callable[[Tensor, Tensor, Tensor], bool]


def fits(q: Tensor, k: Tensor, v: Tensor) -> Fits:
    """A function of q, k and v: whether each has the type, shape, strides, dtype, device, `requires_grad` and negative
    bit that the given one has now, and autocast on q's device type is as it is now.
    """
    plain = {type(q), type(k), type(v)} <= {Tensor, torch.nn.Parameter}
    if plain and (guarded := _guarded(q, k, v)) is not None:
        return guarded
    seen = _facts(q, k, v)
    return lambda q, k, v: _facts(q, k, v) == seen


def _facts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    of_q = type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad, q.is_neg(), is_fake(q)
    of_k = type(k), k.shape, k.stride(), k.dtype, k.device, k.requires_grad, k.is_neg(), is_fake(k)
    of_v = type(v), v.shape, v.stride(), v.dtype, v.device, v.requires_grad, v.is_neg(), is_fake(v)
    return of_q, of_k, of_v, autocast_dtype(q.device.type), private.early_mode_count()


def _guarded(q: Tensor, k: Tensor, v: Tensor) -> Fits | None:
    """Compare with the tensor guards of PyTorch's compiler; None where they do not work."""
    if not _guards_work():
        return None
    check: Fits
    try:
        if q is not k and k is not v and q is not v:
            check = _guard(q, k, v)
        else:  # one guard of all three fails where two are the same tensor
            of_q, of_k, of_v = _guard(q), _guard(k), _guard(v)
            check = lambda q, k, v: of_q(q) and of_k(k) and of_v(v)  # noqa: E731
        kind = q.device.type
        if not (check(q, k, v) and _sees_autocast(check, q, k, v)):
            return None
    except (RuntimeError, TypeError, ValueError):
        return None
    cast = autocast_dtype(kind)
    return check if cast is None else lambda q, k, v: check(q, k, v) and torch.get_autocast_dtype(kind) is cast


def _sees_autocast(check: Fits, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `check` returns False once autocast is switched in this thread."""
    kind = q.device.type
    enabled = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, not enabled)
    try:
        return not check(q, k, v)
    finally:
        torch.set_autocast_enabled(kind, enabled)


def _guard(*tensors: Tensor) -> Any:
    """A check in C++ that takes a third of the time of comparing in Python; private in torch."""
    return private.tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@cache
def _guards_work() -> bool:
    """Whether guards exist, and distinguish all attributes that matter."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _distinguish()
    except (NoBackend, RuntimeError, TypeError, ValueError):
        return False


def _distinguish() -> bool:
    first, wanting = (torch.empty(2, 2, device="cpu", requires_grad=needs) for needs in (False, True))
    unlike = (
        *(first.new_empty(sizes) for sizes in ((2, 3), (1, 2), (4,))),
        first.t(),
        first.half(),
        first.to("meta"),
        torch.nn.Parameter(first, requires_grad=False),
        wanting,
        private.negative_view(first),
    )
    check = _guard(first, first.clone())
    alike = check(first.clone(), first) and _guard(wanting)(wanting)
    return alike and not any(check(other, first) or check(first, other) for other in unlike)


_guards_work()  # at import, not in the first call
