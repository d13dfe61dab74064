"""The native kernel's libraries that a wheel carries: which one is used, and when."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_dispatch import attend, explain
from attn_dispatch.backends import native
from attn_dispatch.kernels.native import library
from attn_dispatch.kernels.native.variants import (
    AMX,
    ARM_ONLY,
    FLAGS,
    MACHINE,
    SOURCE,
    V3,
    V4,
    Variant,
    digest,
    source_text,
    variants,
)
from tests.support.calls import forget_native_library

_, BF16, PLAIN_V4, PLAIN_V3 = VARIANTS = variants("x86_64")
ARM = frozenset({"fp", "asimd", "asimdrdm", "atomics"})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package's folder with a file for each variant, where no compiler is found, nor what one has made."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "VARIANTS", VARIANTS)  # on any machine
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variant in VARIANTS:
        (tmp_path / variant.file).write_text(variant.name)
    forget_native_library()
    yield tmp_path
    monkeypatch.undo()
    forget_native_library()


def use_flags(flags: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    forget_native_library()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (AMX | {"sse"}, "x86-64-v4+amx"),
        (V4 | {"avx512_bf16", "amx_bf16", "sse"}, "x86-64-v4+avx512bf16"),
        (V4, "x86-64-v4"),
        (V4 - {"avx512vl"} | {"avx512_bf16"}, "x86-64-v3"),
        (V3, "x86-64-v3"),
    ],
)
@pytest.mark.usefixtures("package")
def test_the_best_library_that_the_processor_can_run(
    flags: frozenset[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_flags(flags, monkeypatch)
    assert native.version().split(" ")[0] == library.prebuilt().name == name
    assert library.prebuilt().path.read_text() == name


@pytest.mark.parametrize(("features", "name"), [("bf16 i8mm", "armv8.2-a+bf16"), ("sve", "armv8-a"), (None, "armv8-a")])
def test_levels_of_aarch64(features: str | None, name: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the features in /proc/cpuinfo; macOS has none."""
    about = {} if features is None else {"Features": " ".join((*ARM, features))}
    monkeypatch.setattr(library, "cpuinfo", lambda: about)
    monkeypatch.setattr(library, "VARIANTS", variants("aarch64"))
    for variant in variants("aarch64"):
        (package / variant.file).touch()
    forget_native_library()
    assert library.prebuilt().name == name
    assert library.in_use().endswith("would gain: not measured for this level")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_lines_of_aarch64_change_nothing_on_x86_64(variant: Variant, tmp_path: Path) -> None:
    """Nor do they change the version, for which decisions are kept."""
    if shutil.which("g++") is None or MACHINE != "x86_64":
        pytest.skip("there is no g++ for x86-64")
    without = tmp_path / SOURCE.name
    (tmp_path / "attention").mkdir()
    for path in (SOURCE, *SOURCE.with_suffix("").glob("*.h")):
        (tmp_path / path.relative_to(SOURCE.parent)).write_bytes(ARM_ONLY.sub(b"", path.read_bytes()))
    command = ["g++", *FLAGS, *variant.options, "-E", "-P"]
    compiled = [subprocess.check_output([*command, str(each)]) for each in (SOURCE, without)]
    assert compiled[0] == compiled[1]
    assert b"arm/" not in source_text("x86_64")
    assert digest(machine="aarch64") != digest(machine="x86_64")


@pytest.mark.parametrize("flags", [V3 - {"f16c", "avx2"}, frozenset[str]()])
@pytest.mark.usefixtures("package")
def test_a_processor_that_can_run_none(flags: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_flags(flags, monkeypatch)
    with pytest.raises(ImportError, match=r"needs a C\+\+ compiler: no-such-compiler is .*; .* processor with .*f16c"):
        native.version()


def test_a_library_of_another_source_is_not_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_flags(V4 | {"avx512_bf16"}, monkeypatch)
    (package / BF16.file).rename(package / "attention-x86-64-v4+avx512bf16-0123456789ab.so")
    forget_native_library()
    assert library.prebuilt().name == PLAIN_V4.name


def test_without_compiler_and_libraries(package: Path) -> None:
    for variant in VARIANTS:
        (package / variant.file).unlink()
    q = torch.ones(1, 8, 1, 4)
    (row,) = (each for each in explain(q, q, q).candidates if each.backend == "native")
    assert row.status == "not_installed"
    assert row.reason.startswith("needs a C++ compiler: no-such-compiler is not on the PATH")
    assert row.reason.endswith(
        "this installation has no compiled library; wheels for Linux and macOS (arm64) have some"
    )
    with pytest.raises(ImportError):
        library.load()


def test_a_version_is_of_the_source_and_the_level(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of who built it: a decision holds for what this machine's compiler, another's or a wheel's made of it."""
    found = {}
    for flags in (V4, V3):
        use_flags(flags, monkeypatch)
        found[flags] = {native.version()}
        for compiler in ("true", "false"):
            monkeypatch.setenv("CXX", compiler)
            found[flags].add(native.version())
        monkeypatch.setenv("CXX", "no-such-compiler")
        for file in (PLAIN_V3.file, PLAIN_V4.file):
            (package / file).write_text("built by another compiler")
        found[flags].add(native.version())
    monkeypatch.setattr(library, "_source_digest", lambda: "another")
    found[frozenset("source")] = {native.version()}
    assert [len(each) for each in found.values()] == [1, 1, 1]
    assert len(set.union(*found.values())) == 3


@pytest.mark.usefixtures("package")
def test_a_compiler_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shutil.which("true") or "")
    assert library.used_prebuilt() is None


@pytest.fixture
def compiled() -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile a library with")
    return Path(library.load()._name)


def test_the_library_of_the_package_is_loaded(compiled: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(compiled, package / PLAIN_V3.file)
    use_flags(V3, monkeypatch)
    x = torch.ones(1, 2, 1, 4)
    assert attend(x, x, x, backend="native").sum() == 8
    assert library.load()._name == str(package / PLAIN_V3.file)
    assert not (package / "cache").exists()


def test_doctor_says_what_is_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, gain in ((V4, "4 % or less"), (V3, "not measured")):
        use_flags(flags, monkeypatch)
        assert library.prebuilt().name in library.in_use()
        assert gain in library.in_use()
    use_flags(frozenset(), monkeypatch)
    assert library.in_use().startswith("no library for this processor: needs a C++ compiler: no-such-compiler is not")
    monkeypatch.setenv("CXX", "true")
    assert library.in_use() == f"to be compiled for this processor by {shutil.which('true')}, in up to a minute"
    (package / "cache" / "attn-dispatch" / "native").mkdir(parents=True, mode=0o755)
    (there := package / "cache" / "attn-dispatch" / "native" / library._file()).touch(mode=0o644)
    assert library.in_use() == f"compiled for this processor: {there}"
