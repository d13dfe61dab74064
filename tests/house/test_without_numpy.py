"""NumPy is no dependency: where it is missing, `import torch` may say so, and nothing says so for us."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys, warnings
sys.modules["numpy"] = None  # as if it were not installed
with warnings.catch_warnings(record=True) as by_torch:
    warnings.simplefilter("always")
    import torch
with warnings.catch_warnings(record=True) as by_us:
    warnings.simplefilter("always")
    import attn_dispatch
    x = torch.ones(1, 64, 2, 16, requires_grad=True)
    attn_dispatch.attend(x, x, x, segment_lengths=[16, 32], dilation_rates=[1, 2]).sum().backward()
    said = str(attn_dispatch.explain(x, x, x, segment_lengths=[16, 32], dilation_rates=[1, 2]))
print(json.dumps([[str(each.message) for each in found] for found in (by_torch, by_us)] + [said]))
"""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["off", "tune"])
def test_nothing_is_missed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "200")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_torch, by_us, said = json.loads(done.stdout.splitlines()[-1])
    assert by_us == []
    assert all("NumPy" in each for each in by_torch)
    assert "numpy" not in (said + done.stderr).lower()


COMMAND = """
import sys, warnings
sys.modules["numpy"] = None
from attn_dispatch.cli import main
before = list(warnings.filters)
main(["inspect"])
assert list(warnings.filters) == before, "the filters of a program that calls main() have changed"
for arguments in (["inspect"], ["profile", "--shape", "1,32,2,8", "--quick"], ["doctor"]):
    sys.argv[1:] = arguments
    assert main() == 0
"""


@pytest.mark.full
def test_commands_do_not_pass_on_torchs_warning() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "numpy" not in done.stderr.lower()
