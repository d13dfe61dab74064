"""What a GPU machine without internet needs beside its image: gathered and tried here, installed there by --install.

FOLDER/00 gets the wheels, and FOLDER/01, FOLDER/02 ... a part each of one that is larger than a part. VENV/bin/python
sees the packages of the Python that installs, torch among them. Imports nothing but Python's own modules, as there.
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[3] / ".ci" / "constraints.txt"
#: Without what they require: images with PyTorch have it.
PACKAGES = (
    *("flash-attn-4", "quack-kernels==0.6.5", "apache-tvm-ffi==0.1.15.post2", "torch-c-dlpack-ext==0.1.5"),
    *(f"nvidia-cutlass-dsl{part}==4.7.1" for part in ("", "-libs-base", "-libs-core", "-libs-cu13")),
    *("xformers", "nvidia-cuda-runtime-cu12==12.8.90", "msgspec", "platformdirs"),
    *("pytest-xdist", "execnet==2.1.2", "hypothesis", "sortedcontainers==2.4.0"),
)
MODULES = ("torch", "flash_attn.cute", "xformers.ops", "msgspec", "platformdirs", "xdist", "hypothesis")
TAGS = (f"--platform=manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_24", "2014"))
DOWNLOAD = ("-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:", *TAGS, "-c", str(CONSTRAINTS))
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]


def gather(folder: Path, python: str) -> None:
    """Download the wheels for a version of Python, with the versions of CONSTRAINTS."""
    subprocess.run([sys.executable, *DOWNLOAD, "--python-version", python, "-d", folder, *PACKAGES], check=True)


def split(wheel: Path, size: int) -> None:
    """Replace a wheel by parts of at most `size` bytes beside its folder: all members as one xz, not each alone."""
    stored = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stored, "w") as new:
        for member in old.infolist():
            new.writestr(member, old.read(member), zipfile.ZIP_STORED)
    packed = lzma.compress(stored.getvalue(), filters=FILTERS)
    for number, start in enumerate(range(0, len(packed), size), 1):
        part = wheel.parents[1] / f"{number:02}" / f"{wheel.name}.{number:02}"
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(packed[start : start + size])
    wheel.unlink()


def install(folder: Path, place: Path) -> list[str]:
    """Unpack the wheels into a new environment; how the import of each of MODULES ends there."""
    venv.create(place)
    program, packages = place / "bin" / "python", next(place.glob("lib/python*/site-packages"))
    wheels: list[Path | io.BytesIO] = list(folder.glob("00/*.whl"))
    for part in folder.glob("01/*.01"):
        parts = (each.read_bytes() for each in sorted(folder.glob(f"*/{part.stem}.*")))
        wheels.append(io.BytesIO(lzma.decompress(b"".join(parts))))
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(packages)
    # At its start the environment's Python finds the other packages, and for xFormers a CUDA 12 beside torch's 13.
    lines = [f"import site; site.addsitedir({each!r})\n" for each in sys.path if each.endswith("-packages")]
    lines += [f"import ctypes; ctypes.CDLL({str(each)!r})\n" for each in packages.rglob("libcudart.so.12")]
    (packages / "seen.pth").write_text("".join(lines))
    runs = {each: subprocess.run([program, "-c", f"import {each}"], stderr=-1, text=True) for each in MODULES}
    return [f"import {each}: {run.stderr.splitlines()[-1] if run.returncode else 'ok'}" for each, run in runs.items()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--python", default="3.12", help="the GPU machine's (default: 3.12)")
    options.add_argument("--part-bytes", type=int, default=30_000_000, help="of a part at most (default: 30000000)")
    options.add_argument("--install", type=Path, metavar="VENV", help="install what FOLDER has; nothing is gathered")
    given = options.parse_args()
    if given.install is not None:
        print(*install(given.folder, given.install), sep="\n")
        return
    gather(given.folder / "00", given.python)
    for wheel in [each for each in given.folder.glob("00/*.whl") if each.stat().st_size > given.part_bytes]:
        split(wheel, given.part_bytes)
    print(*(f"{each.stat().st_size / 1e6:8.2f} MB  {each}" for each in sorted(given.folder.glob("*/*"))), sep="\n")
    with tempfile.TemporaryDirectory() as here:
        gather(Path(here, "00"), "{}.{}".format(*sys.version_info))
        print(*install(Path(here), Path(here, "venv")), sep="\n")


if __name__ == "__main__":
    main()
