"""What tests of guarded calls share."""

from __future__ import annotations

import subprocess
import sys

PATIENT_S = 60.0


def run(code: str) -> tuple[int, str, str]:
    """A process that loads no torch."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr
