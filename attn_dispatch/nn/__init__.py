"""Modules: projections around one call of attend(), and the layers of LongNet.

Imports the functions that users call, and what they import.
Public: AttentionConfig, DilatedAttention, KVCache, LongNetDecoderLayer, LongNetEncoderLayer, MultiheadAttention.
"""

from importlib import import_module
from typing import Any

from attn_dispatch.nn.attention import DilatedAttention, MultiheadAttention
from attn_dispatch.nn.cache import KVCache
from attn_dispatch.nn.config import AttentionConfig
from attn_dispatch.nn.longnet import LongNetDecoderLayer, LongNetEncoderLayer

__all__ = [
    "AttentionConfig",
    "DilatedAttention",
    "KVCache",
    "LongNetDecoderLayer",
    "LongNetEncoderLayer",
    "MultiheadAttention",
]


def __getattr__(name: str) -> Any:
    if name in ("fkodom", "torchscale"):  # loaded when first used
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
