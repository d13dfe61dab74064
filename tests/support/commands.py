"""The command line from outside: commands in folders of their own, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attn_dispatch.cli import options
from attn_dispatch.spec.problem import Problem

COMMAND = [sys.executable, "-m", "attn_dispatch"]
SMALL = ("--shape", "1,64,2,16", "--device", "cpu")
TWO = ("--shape", "1,64,2,16", "--causal", "both", "--device", "cpu")


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTN_DISPATCH_")}
    return {**kept, "ATTN_DISPATCH_CACHE_DIR": str(folder), **more}


def command(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=surroundings(folder, **more), capture_output=True, text=True, timeout=120
    )


def plain(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(*arguments: str) -> list[Problem]:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return options.problems_of(parser.parse_args(["--device", "cpu", *arguments]))
