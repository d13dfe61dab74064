"""Whether a call is traced, transformed or watched: then what is timed or kept may not be about plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_dispatch.errors import InvalidInput

# Selective checkpointing stores results of operators and gives them again: all else is as without it.
_HARMLESS = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# Private, as what follows; without it nothing is traced before autograd.
_early: Callable[[], int] = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", lambda: 0)


def graphed(*tensors: Tensor) -> bool:
    """Whether a graph is made of what runs, or nothing is computed: torch.export, make_fx, fake tensors."""
    return (
        torch.compiler.is_compiling()
        or _early() > 0
        or any(getattr(mode, "_mode_key", None) is not None for mode in _modes())
        or any(map(_wrapped, tensors))
    )


def amid(*tensors: Tensor) -> bool:
    """Whether a graph is made, torch.func transforms the call, or a dispatch mode sees its operators."""
    return graphed(*tensors) or _transformed() or any(not isinstance(m, _HARMLESS) for m in _modes())


def check_sizes(**tensors: Any) -> None:
    """Raise InvalidInput where a size is a symbol: a decision is about one size."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and any(isinstance(size, torch.SymInt) for size in x.shape):
            raise InvalidInput(
                f"{name} must have sizes that are numbers, got {list(x.shape)}: trace attend with static shapes"
            )


def _modes() -> list[Any]:
    return _get_current_dispatch_mode_stack()


def _transformed() -> bool:
    level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)  # private
    return level is not None and level() is not None


def _wrapped(x: Tensor) -> bool:
    """Whether its type says what operators do with it."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
