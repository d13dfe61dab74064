"""Attention by the fastest backend that was measured on this machine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch import blocks as blocks
    from attn_dispatch import nn as nn
    from attn_dispatch.compat.sdpa import replacing_sdpa
    from attn_dispatch.decisions.decide import counters
    from attn_dispatch.decisions.explanation import Explanation
    from attn_dispatch.dispatch import attend, explain
    from attn_dispatch.errors import (
        AttnDispatchError,
        BackendFailed,
        GroupMismatch,
        InvalidInput,
        NoBackend,
        NotDecided,
        RankLost,
    )
    from attn_dispatch.kernels.numerics import merge
    from attn_dispatch.kernels.registry import register
    from attn_dispatch.machine.hardware import hardware
    from attn_dispatch.profiling import profile
    from attn_dispatch.recording import record
    from attn_dispatch.ring.shards import Sharded, shard, shard_positions, unshard, weights_of
    from attn_dispatch.settings import batch_invariant
    from attn_dispatch.spec.data import Blocks, Ranges
    from attn_dispatch.spec.orders import Reordered, from_order, positions, to_order
    from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
    from attn_dispatch.spec.problem import Problem
    from attn_dispatch.warming import warm

__all__ = [
    "AttnDispatchError",
    "BackendFailed",
    "Blocks",
    "Dense",
    "Dilated",
    "Explanation",
    "GroupMismatch",
    "InvalidInput",
    "Neighborhood",
    "NoBackend",
    "NotDecided",
    "Problem",
    "Ranges",
    "RankLost",
    "Reordered",
    "Sharded",
    "Window",
    "attend",
    "batch_invariant",
    "counters",
    "explain",
    "from_order",
    "hardware",
    "merge",
    "positions",
    "profile",
    "record",
    "register",
    "replacing_sdpa",
    "shard",
    "shard_positions",
    "to_order",
    "unshard",
    "warm",
    "weights_of",
]

# Names are loaded when first used, so that the commands that need no torch start without it.
_NAMES = {
    "compat.sdpa": ("replacing_sdpa",),
    "decisions.decide": ("counters",),
    "decisions.explanation": ("Explanation",),
    "dispatch": ("attend", "explain"),
    "kernels.numerics": ("merge",),
    "kernels.registry": ("register",),
    "machine.hardware": ("hardware",),
    "profiling": ("profile",),
    "recording": ("record",),
    "ring.shards": ("Sharded", "shard", "shard_positions", "unshard", "weights_of"),
    "spec.data": ("Blocks", "Ranges"),
    "settings": ("batch_invariant",),
    "spec.pattern": ("Dense", "Dilated", "Neighborhood", "Window"),
    "spec.problem": ("Problem",),
    "spec.orders": ("Reordered", "from_order", "positions", "to_order"),
    "warming": ("warm",),
}
_HOME = dict.fromkeys(__all__, "errors") | {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attn-dispatch")
    if name in ("blocks", "nn"):  # they import torch, so they are loaded when first used
        return _loaded(name)
    if name not in _HOME:
        raise AttributeError(f"module 'attn_dispatch' has no attribute {name!r}")
    value = getattr(_loaded(_HOME[name]), name)
    globals()[name] = value
    return value


def _loaded(module: str) -> Any:
    try:
        return import_module(f"attn_dispatch.{module}")
    except AttributeError as error:  # of a module inside: Python would take it for a name that is not here
        raise ImportError(f"attn_dispatch.{module} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
