"""Processes that have loaded torch already: forked off one that did nothing else, which saves seconds for each."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Imported once, before processes are forked off; the compiler is what DistributedDataParallel and optimizers ask for.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "hypothesis", "tests.support.ring_calls"]
TIMEOUT_S = 240.0


def context() -> Any:
    """The multiprocessing context whose processes are forked off a preloaded one; on Windows they are new."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that needs torch, with `arguments` from sys.argv[1] on, in this process's environment.

    Other than `python -c`: nothing that is registered with atexit runs, and a process that imports torch by itself, or
    must not, needs one of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        given = code, ["-c", *arguments], dict(os.environ), str(out), str(error)
        process = context().Process(target=_execute, args=given)
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        printed = [path.read_text(encoding="utf-8") if path.exists() else "" for path in (out, error)]
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, *printed)


def printed(*arguments: str, **variables: str) -> str:
    """What a new process of this Python prints, in the repository and with these environment variables; it succeeds."""
    command, env = [sys.executable, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _execute(code: str, arguments: Sequence[str], environment: dict[str, str], out: str, error: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    with open(out, "w", encoding="utf-8") as sys.stdout, open(error, "w", encoding="utf-8", buffering=1) as sys.stderr:
        for number, file in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(file.fileno(), number)
        exitcode = 0
        try:
            exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
        except Exception:  # noqa: BLE001 - as the interpreter does
            traceback.print_exc()
            exitcode = 1
        sys.stdout.flush()
        os._exit(exitcode)
