"""Modules: projections around one call of attend(), and the layers of LongNet.

Imports the functions that users call, and what they import.
Public: AttentionConfig, DilatedAttention, KVCache, LongNetDecoderLayer, LongNetEncoderLayer, MultiheadAttention.
"""

from attn_dispatch.nn import fkodom as fkodom
from attn_dispatch.nn import torchscale as torchscale
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
