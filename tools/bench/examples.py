"""The examples, each run by the command in its docstring, and what they print.

python -m tools.bench.examples [NAME ...]
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.lib.common import RESULTS, parser, write

EXAMPLES = RESULTS.parent.parent / "examples"
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def command_of(path: Path) -> str:
    """The command in an example's docstring, without what is optional."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith(tuple(LAUNCHERS)))
    return line.partition(" [")[0]


def run(command: str, environment: dict[str, str]) -> dict[str, Any]:
    """What a command prints, and its seconds."""
    launcher, *arguments = command.split()
    start = time.perf_counter()
    done = subprocess.run(
        [*LAUNCHERS[launcher], *arguments],
        cwd=EXAMPLES.parent,
        env={**os.environ, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, flush=True)
    return {"command": command, "lines": done.stdout.splitlines(), "seconds": time.perf_counter() - start}


def main() -> None:
    options = parser(__doc__, "examples.json")
    options.add_argument("names", nargs="*", help="examples to run again; the others keep what they printed")
    given = options.parse_args()
    paths = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
    before = json.loads(given.output.read_text())["examples"] if given.names and given.output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        # Ranks on one machine may share its cores; decisions of earlier runs are not taken.
        environment = {"ATTN_DISPATCH_CACHE_DIR": folder, "PYTHONPATH": str(EXAMPLES.parent)}
        found = before | {name: run(command_of(paths[name]), environment) for name in given.names or paths}
    write(given.output, {"examples": {name: found[name] for name in paths if name in found}})


if __name__ == "__main__":
    main()
