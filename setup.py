"""Builds the wheel: with the native kernel compiled where a C++ compiler is found for one of `SYSTEMS`; else pure.

Everything else is in pyproject.toml. A plain tag such as `linux_x86_64`: the libraries need glibc 2.27. For another
processor than this one: _PYTHON_HOST_PLATFORM=linux-aarch64 CXX=aarch64-linux-gnu-g++.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SYSTEMS = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64", "darwin-arm64": "aarch64"}  #: and their processors
SYSTEM = os.environ.get("_PYTHON_HOST_PLATFORM", f"{sys.platform}-{platform.machine()}")
PACKAGE = Path(__file__).parent / "attn_dispatch"
WITHOUT = "attn-dispatch is built without the compiled kernel of its backend `native`, which then needs a C++ compiler"


def module(path: str) -> ModuleType:
    """A module of the package by itself: the package's own imports are not installed here."""
    spec = spec_from_file_location(Path(path).stem, PACKAGE / path)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def command() -> tuple[str, ...] | None:
    """The command line of the C++ compiler, or None, with a message, where nothing is compiled."""
    try:
        if SYSTEM not in SYSTEMS:
            raise ImportError(f"it is compiled for {', '.join(SYSTEMS)}, not for {SYSTEM}")
        found: tuple[str, ...] = module("machine/compiler.py").compiler()
    except ImportError as error:
        print(f"{WITHOUT}: {error}", file=sys.stderr)
        return None
    return found


CXX = command()


class Compiled(Distribution):
    """A distribution whose wheel is for one platform where the kernel is compiled."""

    def has_ext_modules(self) -> bool:
        return CXX is not None


class Wheel(bdist_wheel):
    """A wheel for every Python of a platform: the kernel does not depend on Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Build(build_py):
    """Compiles the kernel beside the package's files; an editable installation compiles it when it is used."""

    def run(self) -> None:
        super().run()
        if CXX is None or self.editable_mode:
            return
        folder = Path(self.build_lib) / "attn_dispatch" / "kernels" / "native"
        for old in folder.glob("attention-*"):
            old.unlink()
        variants = module("kernels/native/variants.py")

        def compiled(variant: Any) -> None:
            library = folder / variant.file
            try:
                variants.build(CXX, variant.options, library)
            except (OSError, subprocess.CalledProcessError) as error:
                text = getattr(error, "stderr", None) or str(error)
                print(f"the library of `native` for {variant.name} is not built: {text[-2000:]}", file=sys.stderr)
            library.with_suffix(".o").unlink(missing_ok=True)

        with ThreadPoolExecutor() as pool:  # of seconds each
            list(pool.map(compiled, variants.variants(SYSTEMS[SYSTEM])))


setup(distclass=Compiled, cmdclass={"bdist_wheel": Wheel, "build_py": Build})
