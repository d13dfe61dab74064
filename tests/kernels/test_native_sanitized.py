"""The native kernel in programs under sanitizers: its parts, and whole passes in threads, against plain loops."""

from __future__ import annotations

import platform
import subprocess
from itertools import product
from pathlib import Path

import pytest

from attn_dispatch.kernels.native.library import cpu_flags
from attn_dispatch.kernels.native.variants import FLAGS, SOURCE, V3
from attn_dispatch.machine.compiler import compiler

SUPPORT = Path(__file__).parents[1] / "support"
#: By the compiler's option: the programs, and their argument. Races are looked for in what runs in several threads.
SANITIZERS = {
    "address,undefined": (("native_parts", ""), ("native_passes", "")),
    "thread": (("native_passes", "threads"),),
}
#: -Og: with more, the compiler takes minutes to instrument products that are unrolled.
OPTIONS = ("-Og", "-g1", "-pthread", "-fno-sanitize-recover=all")
LEVELS = {"native": frozenset[str](), "x86-64-v3": V3, "x86-64": frozenset[str]()}

pytestmark = pytest.mark.full


def built(program: Path, source: Path, *options: str) -> Path:
    try:
        command = compiler().command
    except ImportError as error:
        pytest.skip(str(error))
    subprocess.run(
        [*command, *FLAGS, *OPTIONS, *options, f"-I{SOURCE.parent}", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return program


def skip_without(sanitizer: str, folder: Path) -> None:
    """The compiler may lack the sanitizer's library, or the system the addresses that it needs."""
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    try:
        subprocess.run([str(built(folder / "empty", source, f"-fsanitize={sanitizer}"))], check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"an empty program with -fsanitize={sanitizer} fails: {error}")


# Races are those of threads, whatever the instructions.
@pytest.mark.parametrize(("level", "sanitizer"), [*product(LEVELS, ["address,undefined"]), ("native", "thread")])
def test_no_fault_and_the_results_of_plain_loops(level: str, sanitizer: str, tmp_path: Path) -> None:
    if level != "native" and platform.machine() != "x86_64":
        pytest.skip(f"{level} is not for this processor")
    if not LEVELS[level] <= cpu_flags():
        pytest.skip("this processor cannot run it")
    skip_without(sanitizer, tmp_path)
    for name, argument in SANITIZERS[sanitizer]:
        options = f"-fsanitize={sanitizer}", f"-march={level}"
        program = built(tmp_path / name, SUPPORT / f"{name}.cpp", *options)
        done = subprocess.run(
            [str(program), *argument.split()], capture_output=True, text=True, check=False, timeout=600
        )
        assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout[-3000:] + done.stderr[:6000]
