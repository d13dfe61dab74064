"""attend() under the names and with the arguments of other attention functions, each aligned as that one is.

Imports the functions that users call, and what they import.
Public: the functions of flash-attn, NATTEN, PyTorch and xFormers that `__all__` names.
"""

from attn_dispatch.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attn_dispatch.compat.natten import na1d, na2d, na3d
from attn_dispatch.compat.sdpa import scaled_dot_product_attention
from attn_dispatch.compat.xformers import memory_efficient_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "memory_efficient_attention",
    "na1d",
    "na2d",
    "na3d",
    "scaled_dot_product_attention",
]
