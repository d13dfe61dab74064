"""The native kernel as other compilers build it, and for other processors: results against float64."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.backends import native
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library, run
from attn_dispatch.kernels.native.variants import VARIANTS, Variant, build, variants
from attn_dispatch.testing.cases import CASES
from tests.support.calls import forget_native_library
from tests.support.cases import dropped_otherwise, gate
from tests.support.distributions import built, copied, skip_without
from tests.support.native_driver import Program

ROOT = Path(__file__).parents[2]
NAMES = {
    *("dense-tiles", "dense-odd-head-dim", "causal-both-masks", "large-scores", "window-sinks"),
    *("longnet-ragged-causal", "longnet-head-dim-not-last", "neighborhood-2d-mixed"),
}
CHOSEN = [case for case in CASES if case.id in NAMES]
LARGEST = 2_200_000  #: bytes of a wheel, whose libraries take half of it
CROSS, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static")

pytestmark = pytest.mark.full


def failures() -> list[str]:
    """Of forward and backward passes by whatever `library.load` gives."""
    found = []
    for case in CHOSEN:
        for dtype in run.DTYPES:
            expected = gate(case.problem(dtype, needs_grad=True))
            found += [
                f"{case.id}, {dtype}: {each}" for each in expected.check(expected.run(registry.load("native"))).failures
            ]
        if case.id == "causal-both-masks":
            for dtype in run.DTYPES[:2]:
                problem = replace(case.problem(dtype, needs_grad=True), dropout_p=0.3)
                found += [f"dropout, {dtype}: {each}" for each in dropped_otherwise(registry.load("native"), problem)]
    return found


def test_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("clang++ is not installed")
    build([clang], library.OPTIONS, tmp_path / "attention.so")
    found = ctypes.CDLL(str(tmp_path / "attention.so"))
    monkeypatch.setattr(library, "load", lambda: found)
    assert failures() == []


@pytest.mark.parametrize("variant", variants("aarch64"), ids=lambda variant: str(variant.name))
def test_aarch64(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tools.checks arm` does more."""
    emulator = next(filter(None, map(shutil.which, EMULATOR)), None)
    if shutil.which(CROSS) is None or emulator is None:
        pytest.skip(f"{CROSS} or {EMULATOR[0]} is not installed")
    program = Program.used(monkeypatch, tmp_path, [CROSS], *variant.options, "-static", "-fopenmp", emulator=emulator)
    assert failures() == []
    assert program.calls == 2 * (len(CHOSEN) * len(run.DTYPES) + 2)  # with two of dropout


# --- wheels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a distribution is made of, without what earlier builds left."""
    skip_without("setuptools")
    return copied(ROOT, tmp_path_factory.mktemp("tree"))


def unpacked(wheel: Path, to: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    return to


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or shutil.which("g++") is None:
        pytest.skip("the kernel is compiled into wheels for Linux on x86-64, where g++ is installed")
    return built("wheel", tree, tmp_path_factory.mktemp("wheel"), CXX="g++")[0]


@pytest.fixture
def in_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[str]], str]]:
    """Uses the wheel's libraries, without a compiler, as on a processor with these flags alone; gives the version."""
    folder = unpacked(wheel, tmp_path / "wheel") / "attn_dispatch" / "kernels" / "native"
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is compiled

    def used(flags: set[str]) -> str:
        monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags))
        forget_native_library()
        return native.version()

    yield used
    monkeypatch.undo()
    forget_native_library()


def assert_complete(wheel: Path, carried: tuple[Variant, ...]) -> None:
    """It has the package and these libraries alone, and stays small."""
    names = zipfile.ZipFile(wheel).namelist()
    native = "attn_dispatch/kernels/native/"
    assert {name for name in names if name.endswith((".so", ".o"))} == {native + each.file for each in carried}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"attn_dispatch"}
    assert {f"{native}attention/arm/neon.h", "attn_dispatch/backends/native.py", "attn_dispatch/py.typed"} <= {*names}
    assert wheel.stat().st_size < LARGEST


def glibc_of(library: Path, objdump: str) -> tuple[int, ...]:
    """The newest version of glibc that it needs; it needs no C++ library."""
    found = subprocess.run([objdump, "-T", str(library)], capture_output=True, text=True, check=True)
    assert "GLIBCXX" not in found.stdout
    versions = [word.strip("()").split("_")[1] for word in found.stdout.split() if word.startswith("(GLIBC_")]
    return max(tuple(map(int, each.split("."))) for each in versions)


def test_a_wheel_is_for_every_python_of_its_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert_complete(wheel, variants("x86_64"))


def test_a_wheel_for_aarch64(tree: Path, tmp_path: Path) -> None:
    if shutil.which(CROSS) is None:
        pytest.skip(f"{CROSS} is not installed")
    wheel, _ = built("wheel", tree, tmp_path / "arm", CXX=CROSS, _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    assert_complete(wheel, variants("aarch64"))
    for each in unpacked(wheel, tmp_path / "wheel").rglob("*.so"):
        assert each.read_bytes()[18:20] == b"\xb7\0"  # the processor, in ELF
        assert glibc_of(each, CROSS.replace("g++", "objdump")) <= (2, 27)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"_PYTHON_HOST_PLATFORM": "win32-AMD64"}, "not for win32-AMD64"),
        ({"_PYTHON_HOST_PLATFORM": "linux-riscv64"}, "not for linux-riscv64"),
        ({"CXX": "no-such-compiler"}, "no-such-compiler is not on the PATH"),
        ({"CXX": shutil.which("false") or ""}, "is not built: "),
    ],
    ids=["windows", "riscv", "no compiler", "one that fails"],
)
def test_elsewhere_the_wheel_has_no_libraries(variables: dict[str, str], text: str, tree: Path, tmp_path: Path) -> None:
    """It is pure, and has the sources, but where a compiler failed."""
    wheel, printed = built("wheel", tree, tmp_path / "pure", **variables)
    assert printed.count(text) >= (len(VARIANTS) if "not built" in text else 1)
    if "not built" not in text:
        assert wheel.name.endswith("-py3-none-any.whl")
        assert_complete(wheel, ())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith((".so", ".o"))]
    assert {f"attn_dispatch/kernels/native/attention{each}" for each in (".cpp", "/forward.h")} <= set(names)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant.name))
def test_each_library_of_a_wheel(variant: Any, in_wheel: Callable[[set[str]], str]) -> None:
    if not variant.needs <= library.cpu_flags():
        pytest.skip("this processor cannot run it")
    assert in_wheel(variant.needs).startswith(f"{variant.name} ")
    assert failures() == []
    assert library.load()._name == str(library.prebuilt().path)
    if shutil.which("objdump"):
        assert glibc_of(library.prebuilt().path, "objdump") <= (2, 27)


def test_an_installed_wheel_runs_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """A process of its own, which finds no program at all."""
    code = (
        "import torch, attn_dispatch as a\n"
        "from attn_dispatch.backends import native\n"
        "x = torch.ones(1, 2, 1, 4)\n"
        "print(a.__file__, native.version(), a.attend(x, x, x, backend='native').sum().item(), sep='\\n')"
    )
    folder = unpacked(wheel, tmp_path / "site")
    variables = {"PATH": "", "PYTHONPATH": str(folder), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    where, version, total = done.stdout.splitlines()
    assert Path(where).is_relative_to(folder)
    assert version.startswith("x86-64-")
    assert float(total) == 8
    assert not (tmp_path / ".cache" / "attn-dispatch" / "native").exists()


def test_a_source_distribution_has_what_the_wheel_needs(tree: Path, tmp_path: Path) -> None:
    archive, _ = built("sdist", tree, tmp_path / "source", CXX="no-such-compiler")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    wheel, _ = built("wheel", folder, tmp_path / "again", CXX="no-such-compiler")
    direct, _ = built("wheel", tree, tmp_path / "direct", CXX="no-such-compiler")
    names = [set(zipfile.ZipFile(each).namelist()) for each in (wheel, direct)]
    assert names[0] == names[1]
    assert (folder / "setup.py").exists()
