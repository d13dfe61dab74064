"""Machine requirements of FlexAttention's CPU kernel: AVX2, and a C++ compiler that torch.compile can start."""

from __future__ import annotations

import os
import sys
from functools import cache

from attn_dispatch import private
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.machine.compiler import compiler


def refusals() -> tuple[Refusal, ...]:
    """Why the kernel cannot be compiled here; empty where it can."""
    return _refusals(*(os.environ.get(name) for name in ("CXX", "PATH", "ATEN_CPU_CAPABILITY")))


@cache
def _refusals(*environment: str | None) -> tuple[Refusal, ...]:
    """`refusals` in an environment, which the compiler is looked for in."""
    try:
        cxx = compiler()
    except ImportError as error:
        return (Refusal("not_installed", f"compiles its CPU kernel: {error}"),)
    if len(cxx) > 1:  # it takes all of $CXX as one program
        text = f"torch.compile takes a C++ compiler without arguments and launchers, and $CXX is {os.environ['CXX']!r}"
        return (Refusal("not_installed", text),)
    if sys.platform != "linux" or not private.has_avx2():
        return (Refusal("processor", "its CPU kernel needs Linux, and AVX2"),)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return (Refusal("processor", "its CPU kernel needs AVX2, which $ATEN_CPU_CAPABILITY=default turns off"),)
    return ()
