"""What attention.cpp is compiled with, and the forms in which a wheel carries it for processors that it does not know.

Only the standard library, since setup.py reads this file where nothing is installed.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("attention.cpp")  #: includes the files of the folder attention
ARITHMETIC = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", *ARITHMETIC)  #: nothing of libstdc++ is needed then
#: The threads are those of the OpenMP library that PyTorch has loaded, to which GOMP_parallel resolves.
LINK_FLAGS = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--as-needed",)))
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())  #: as Linux names it
#: What is compiled for this very processor. On aarch64 clang knows no -march=native.
NATIVE = "-mcpu=native" if MACHINE == "aarch64" else "-march=native"
ARM_ONLY = re.compile(rb'^.*(?:__ARM_|"arm/).*\n', flags=re.MULTILINE)  #: lines that only aarch64 compiles

V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AMX = V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}


def source_text(machine: str = MACHINE) -> bytes:
    """All that is compiled for a kind of processor: attention.cpp and the files that it includes."""
    folder = SOURCE.with_suffix("")
    texts = [path.read_bytes() for path in (SOURCE, *sorted(folder.glob("*.h")))]
    if machine == "aarch64":
        return b"\0".join((*texts, *(path.read_bytes() for path in sorted(folder.glob("arm/*.h")))))
    return b"\0".join(ARM_ONLY.sub(b"", text) for text in texts)


def digest(options: Sequence[str] = (), machine: str = MACHINE) -> str:
    """Twelve digits for all that is compiled, and with what options."""
    text = "\0".join((*FLAGS, *LINK_FLAGS, *options)).encode() + source_text(machine)
    return hashlib.sha256(text).hexdigest()[:12]


class Variant(NamedTuple):
    """A compiled form: its name, the compiler's options, and the processor's flags in /proc/cpuinfo that it needs."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]
    machine: str = "x86_64"

    @property
    def file(self) -> str:
        """The library's name, with a digest of source and options: one of another version is not loaded."""
        return f"attention-{self.name}-{digest(self.options, self.machine)}.so"


#: The fastest of each kind of processor first.
ALL = (
    Variant("x86-64-v4+amx", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), AMX),
    Variant("x86-64-v4+avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), V4 | {"avx512_bf16"}),
    Variant("x86-64-v4", ("-march=x86-64-v4",), V4),
    Variant("x86-64-v3", ("-march=x86-64-v3",), V3),
    Variant("armv8.2-a+bf16", ("-march=armv8.2-a+bf16",), frozenset({"asimdrdm", "atomics", "bf16"}), "aarch64"),
    Variant("armv8-a", ("-march=armv8-a",), frozenset(), "aarch64"),
)


def variants(machine: str = MACHINE) -> tuple[Variant, ...]:
    """Those for a kind of processor; none where wheels carry no library."""
    return tuple(each for each in ALL if each.machine == machine)


VARIANTS = variants()


def build(command: Sequence[str], options: Sequence[str], library: Path, source: Path = SOURCE) -> None:
    """Compile a library, with its object file beside it.

    Args:
        command: the compiler's command line.
        source: what is compiled instead of the kernel.

    Raises:
        subprocess.CalledProcessError: the compiler failed; `stderr` is its text. OSError: it cannot be run.
    """
    compiled = library.with_suffix(".o")
    for words in (
        [*FLAGS, *options, "-c", str(source), "-o", str(compiled)],
        [*LINK_FLAGS, str(compiled), "-o", str(library)],
    ):
        subprocess.run([*command, *words], capture_output=True, text=True, check=True)
