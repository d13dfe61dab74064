"""A ring over a rate-limited link, in a network namespace; skipped where that needs more rights."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.slow_link import slowed

BYTES_PER_S = 2e6


def skip_reason() -> str:
    missing = [name for name in ("unshare", "tc", "ip") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    command = ["unshare", "-n", "sh", "-c", slowed(BYTES_PER_S)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() or f"{command[0]} ends with {done.returncode}" if done.returncode else ""


@pytest.mark.full
def test_a_slow_link_changes_nothing_but_time() -> None:
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    command = ["unshare", "-n", sys.executable, "-m", "tests.support.slow_link", str(BYTES_PER_S)]
    took, bytes_sent, *failures = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not failures
    assert int(bytes_sent) == 256 * 4 * 64 * 4 * 2 * 3, "k and v forward and backward, and their gradients"
    assert float(took) > int(bytes_sent) / BYTES_PER_S / 2, "the link was that slow"
