"""An environment with the peers of `python -m tools.bench peers`, beside the one that runs it, whose torch it uses."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

from attn_dispatch.text import one_line

#: What pip is given for each peer, first what others need. Their own dependencies are not installed: these would bring
#: another torch, and are either here or not needed for what is called.
SOURCES = {
    "einops": "einops==0.8.2",
    "hyper-connections": "hyper-connections",
    "local-attention": "local-attention==1.11.2",
    "natten": "natten==0.21.7",
    "dilated-attention-pytorch": "dilated-attention-pytorch==0.2.0",
    # The one on PyPI, 0.3.0, has no dilated attention.
    "torchscale": "git+https://github.com/microsoft/torchscale",
}
INSTALL_S = 120.0  #: limit of one installation
VERSIONS = """
import importlib.metadata, json
found = [(each.name, each.version) for each in importlib.metadata.distributions() if each.name]
print(json.dumps({name.lower(): version for name, version in reversed(found)}))
"""  # of two of one name the first on the path, which is imported


def prepared(folder: Path, sources: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """The environment's Python, and why peers are not in it, by name.

    Args:
        folder: of the environment, made if there is none.
        sources: what pip is given for peers, where that differs from `SOURCES`.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    # As `site` adds a folder: with the .pth files in it, by which editable installations are found.
    folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = [f"import site; site.addsitedir({each!r})" for each in folders]
    (packages / "running_environment.pth").write_text("\n".join(lines) + "\n")
    missing = {}
    for name, source in {**SOURCES, **sources}.items():
        if why := _installed(python, source):
            missing[name] = f"pip install --no-deps {source}: {why}"
    return python, missing


def _installed(python: Path, source: str) -> str:
    """Install it; why that failed, empty if it did not."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--no-build-isolation", source], capture_output=True, text=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        return f"not done after {INSTALL_S:.0f} s"
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return "" if done.returncode == 0 else one_line(RuntimeError(errors[0] if errors else done.stderr[-200:]))


def versions(python: Path) -> dict[str, str]:
    """The version of every distribution that this Python finds, by its name in lower case."""
    done = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
