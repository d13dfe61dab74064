"""The package on Windows and macOS: simulated here, as far as a process can lack what they lack; elsewhere as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SYSTEMS = ("win32", "darwin") if sys.platform == "linux" else (sys.platform,)

pytestmark = pytest.mark.full

#: Calls of several patterns, each right by float64 and decided as `expected` says.
ANSWERED = """
import sys
import torch
from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend, counters, process_state
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.folder import Store
from attn_dispatch.testing import oracle

CALLS = (
    (Dense(), torch.float32), (Window(7, 0, 2), torch.bfloat16), (Dilated((16, 32), (1, 2), True), torch.float32),
    (Neighborhood((8, 8), (3, 3)), torch.float32),
)

def answer(expected):
    process_state.forget_all()
    for pattern, dtype in CALLS:
        q, k, v, grad = (torch.randn(1, 64, 2, 16).to(dtype) for _ in range(4))
        right = oracle(q, k, v, pattern, grad=grad)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(q, k, v, pattern)
        out.backward(grad)
        for name, found in {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
            assert (found.double() - right[name].value).abs().max() <= right[name].tolerance, (pattern, name)
    made, stored = counters(), len(list(Store(cache_folder()).all()))
    assert made[expected] == sum(made.values()) == len(CALLS), made
    assert stored == (0 if expected == "heuristic" else len(CALLS)), stored
"""
#: Modes in which no call waits for a trial; then calls pay for one.
MODES = """
import os
for mode in ("off", "predict", "online"):
    os.environ["ATTN_DISPATCH_MODE"] = mode
    answer("heuristic")
os.environ["ATTN_DISPATCH_OVERHEAD"] = "1"
process_state.forget_all()
x = torch.randn(1, 64, 2, 16)
while not counters()["measured"]:
    attend(x, x, x)
"""
COMMANDS = """
from attn_dispatch.cli import main
for arguments in (
    ("profile", "--shape", "1,64,2,16", "--causal", "--quick"),
    ("explain", "--shape", "1,64,2,16", "--causal"),
    ("inspect",),
    ("doctor",),
    ("limits", "--lengths", "64:128", "--backend", "manual", "--device", "cpu"),
):
    assert main(arguments) == 0
"""
#: A candidate that ends its process.
CRASHING = """
import os
import torch
from attn_dispatch import attend, counters, register

class Crasher:
    name = "crasher"
    version = lambda self: "1"
    refusals = lambda self, problem: []
    workspace_bytes = lambda self, problem: 0
    run = lambda self, *arguments, **tensors: os._exit(7)

register(Crasher())
x = torch.randn(1, 64, 2, 16)
attend(x, x, x)
assert counters()["measured"] == 1
"""
#: Files that are replaced while other threads read them.
SHARED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from attn_dispatch.store import files

folder = Path(sys.argv[1])
contents = [bytes([65 + number]) * 4096 for number in range(8)]

def work(content):
    for number in range(20):
        with files.locked(folder, folder):
            files.write(folder / "one", content)
        assert files.read(folder / "one", 4096) in contents
        files.append_bounded(folder, folder / "lines", content[:9] + b"\\n", 1000)

with ThreadPoolExecutor() as pool:
    list(pool.map(work, contents))
lines = (folder / "lines").read_bytes().split(b"\\n")
assert {len(line) for line in lines} == {0, 9}, lines
assert list(folder.glob("*.tmp")) == []
"""


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "100")
    monkeypatch.setenv("ATTN_DISPATCH_TRIAL_SECONDS", "1e6")  # also where the machine is busy
    if sys.platform == "linux":
        monkeypatch.setenv("CXX", "no-such-compiler")  # this one makes nothing for another system
    return str(request.param)


def ran(system: str, code: str, *arguments: str, exits: int = 0) -> str:
    """What a process of the system prints."""
    simulated = f"from tests.support.simulated_system import simulate\nsimulate({system!r})\n"
    # Not forked off one that has loaded the package: that has looked at the system.
    command = [sys.executable, "-c", simulated * (sys.platform == "linux") + code, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == exits, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_what_is_measured_is_stored_for_the_next_process(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The mode `tune` may go on with provisional ones.
    for expected, mode in (("measured", "tune"), ("loaded", "predict"), ("loaded", "locked")):
        monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)
        ran(system, f"{ANSWERED}\nanswer({expected!r})")


def test_modes(system: str) -> None:
    ran(system, ANSWERED + MODES)


def test_commands(system: str) -> None:
    said = ran(system, COMMANDS)
    for each in ("   chosen", "(measured)", "1 decisions", "128 tokens with manual"):
        assert each in said
    assert ("native is built for Linux and macOS" in said) == (system == "win32")


def test_a_candidate_that_ends_its_process_is_out_after_two(system: str) -> None:
    for code in (7, 7, 0):
        said = ran(system, CRASHING, exits=code)
    assert "crasher" in said


def test_files_that_are_in_use(system: str, folder: Path) -> None:
    ran(system, SHARED, str(folder))
