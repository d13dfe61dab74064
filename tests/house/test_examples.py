"""The examples run as their first lines say, and check themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.full
def test_context_parallel_loses_what_one_process_loses(tmp_path: Path) -> None:
    """By the command in its docstring; `--check` fails where a loss is another than on whole sequences."""
    script = EXAMPLES / "context_parallel.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    own = {"ATTN_DISPATCH_MODE": "off", "ATTN_DISPATCH_CACHE_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    command = [*launch, str(script), "--check"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [
        float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+), 256 tokens over 2 ranks$", done.stdout, re.M)
    ]
    alone = re.search(r"^in one process: (.*)$", done.stdout, re.M)
    assert alone is not None
    assert len(losses) == len(alone[1].split(", ")) == 2
    assert losses[1] < losses[0]


def test_the_documentation_names_every_example() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in text
