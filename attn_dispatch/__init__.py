"""Attention by the fastest backend that was measured on this machine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch.decisions import counters
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
    from attn_dispatch.explanation import Explanation
    from attn_dispatch.machine import hardware
    from attn_dispatch.pattern import Dense, Dilated, Neighborhood, Window
    from attn_dispatch.problem import Problem
    from attn_dispatch.profiling import profile
    from attn_dispatch.recording import record
    from attn_dispatch.registry import register
    from attn_dispatch.reorder import Reordered, from_order, positions, to_order
    from attn_dispatch.ring.shards import Sharded, shard, shard_positions, unshard, weights_of

__all__ = [
    "AttnDispatchError",
    "BackendFailed",
    "Dense",
    "Dilated",
    "Explanation",
    "GroupMismatch",
    "InvalidInput",
    "Neighborhood",
    "NoBackend",
    "NotDecided",
    "Problem",
    "RankLost",
    "Reordered",
    "Sharded",
    "Window",
    "attend",
    "counters",
    "explain",
    "from_order",
    "hardware",
    "positions",
    "profile",
    "record",
    "register",
    "shard",
    "shard_positions",
    "to_order",
    "unshard",
    "weights_of",
]

# Names are loaded when first used, so that the commands that need no torch start without it.
_HOME = {
    "attend": "dispatch",
    "counters": "decisions",
    "explain": "dispatch",
    "AttnDispatchError": "errors",
    "BackendFailed": "errors",
    "GroupMismatch": "errors",
    "InvalidInput": "errors",
    "NoBackend": "errors",
    "NotDecided": "errors",
    "RankLost": "errors",
    "Explanation": "explanation",
    "hardware": "machine",
    "Dense": "pattern",
    "Dilated": "pattern",
    "Neighborhood": "pattern",
    "Window": "pattern",
    "Problem": "problem",
    "profile": "profiling",
    "record": "recording",
    "register": "registry",
    "Reordered": "reorder",
    "from_order": "reorder",
    "positions": "reorder",
    "to_order": "reorder",
    "Sharded": "ring.shards",
    "shard": "ring.shards",
    "shard_positions": "ring.shards",
    "unshard": "ring.shards",
    "weights_of": "ring.shards",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attn-dispatch")
    if name not in _HOME:
        raise AttributeError(f"module 'attn_dispatch' has no attribute {name!r}")
    value = getattr(import_module(f"attn_dispatch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
