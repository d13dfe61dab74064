"""The command line: commands in folders of their own, and what they print."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from attn_dispatch.cli import main, options
from attn_dispatch.log import logger
from attn_dispatch.spec.problem import Problem
from tests.support import calls

COMMAND = [sys.executable, "-m", "attn_dispatch"]
SMALL = ("--shape", "1,64,2,16", "--device", "cpu")
TWO = ("--shape", "1,64,2,16", "--causal", "both", "--device", "cpu")


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTN_DISPATCH_")}
    return {**kept, "ATTN_DISPATCH_CACHE_DIR": str(folder), **more}


def command(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in this process: that saves the seconds in which a new one loads torch."""
    coding = more.get("PYTHONIOENCODING", "utf-8")
    out, error = io.TextIOWrapper(io.BytesIO(), encoding=coding), io.StringIO()
    with _environment(surroundings(folder, **more)), redirect_stdout(out), redirect_stderr(error), _logged_to(error):
        code = _exit_code(arguments)
    out.seek(0)
    return subprocess.CompletedProcess(arguments, code, out.read(), error.getvalue())


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter prints it too
        traceback.print_exc()
        return 1


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These alone, and nothing that this process remembers, as a new process has it."""
    before = dict(os.environ)
    try:
        calls.forget_all()
        os.environ.clear()
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        calls.forget_all()


@contextmanager
def _logged_to(stream: io.StringIO) -> Iterator[None]:
    """Warnings reach stderr, as they do where no handler is installed; pytest installs one."""
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def plain(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(*arguments: str) -> list[Problem]:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return options.problems_of(parser.parse_args(["--device", "cpu", *arguments]))
