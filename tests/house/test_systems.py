"""The package on Windows and macOS: simulated here, as far as a process can lack what they lack; elsewhere as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import processes

SYSTEMS = ("win32", "darwin") if sys.platform == "linux" else (sys.platform,)

pytestmark = pytest.mark.full

#: Calls of several patterns, right by float64, all decided as `argv[1]` says.
ANSWERED = """
import sys
import torch
from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend, counters
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.folder import Store
from attn_dispatch.testing import oracle

patterns = (Dense(), Window(7, 0, 2), Dilated((16, 32), (1, 2), True), Neighborhood((8, 8), (3, 3)))
for pattern in patterns:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (torch.randn(1, 64, 4, 16).to(dtype) for _ in range(4))
        expected = oracle(q, k, v, pattern, grad=grad)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(q, k, v, pattern)
        out.backward(grad)
        for name, found in {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
            assert (found.double() - expected[name].value).abs().max() <= expected[name].tolerance, (pattern, name)
made, stored = counters(), len(list(Store(cache_folder()).all()))
assert made[sys.argv[1]] == sum(made.values()) == 2 * len(patterns), made
assert stored == (0 if sys.argv[1] == "heuristic" else 2 * len(patterns)), stored
"""
#: A candidate that ends its process; None of it is left after two of them.
CRASHING = """
import os
import torch
from attn_dispatch import attend, counters, register
from attn_dispatch.backends import manual

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
ONLINE = """
import torch
from attn_dispatch import attend, counters
x = torch.randn(1, 64, 2, 16)
for _ in range(20_000):
    attend(x, x, x)
    if counters()["measured"]:
        break
assert counters()["measured"] == 1, counters()
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
    for number in range(50):
        with files.locked(folder, folder):
            files.write(folder / "one", content)
        assert files.read(folder / "one", 4096) in contents
        files.append_bounded(folder, folder / "lines", content[:9] + b"\\n", 1000)

with ThreadPoolExecutor() as pool:
    list(pool.map(work, contents))
lines = (folder / "lines").read_bytes().split(b"\\n")
assert {len(line) for line in lines} == {0, 9}, lines
assert [path.name for path in folder.glob("*.tmp")] == []
"""


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "200")
    if sys.platform == "linux":
        monkeypatch.setenv("CXX", "no-such-compiler")  # this one makes nothing for another system
    return str(request.param)


def ran(system: str, code: str, *arguments: str, exits: int = 0) -> str:
    """What a process of the system prints."""
    simulated = f"from tests.support.simulated_system import simulate\nsimulate({system!r})\n"
    done = processes.run(simulated * (sys.platform == "linux") + code, *arguments)
    assert done.returncode == exits, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def command(system: str, *arguments: str) -> str:
    return ran(system, "import sys\nfrom attn_dispatch.cli import main\nassert main(sys.argv[1:]) == 0", *arguments)


def test_what_is_measured_is_stored_for_the_next_process(system: str) -> None:
    for how in ("measured", "loaded"):
        assert ran(system, ANSWERED, how) == ""
    assert "8 decisions" in command(system, "inspect")
    assert "measured" in command(system, "explain", "--shape", "1,64,4,16", "--backward")


@pytest.mark.parametrize("mode", ["off", "predict", "locked", "online"])
def test_modes_that_measure_nothing_at_once(mode: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)
    ran(system, ANSWERED, "heuristic")


def test_a_trial_beside_calls_ends(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "online")
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "1")
    ran(system, ONLINE)


def test_a_candidate_that_ends_its_process_is_out_after_two(system: str) -> None:
    for code in (7, 7, 0):
        said = ran(system, CRASHING, exits=code)
    assert "crasher" in said


def test_files_that_are_in_use(system: str, folder: Path) -> None:
    ran(system, SHARED, str(folder))


def test_commands(system: str) -> None:
    assert "chosen" in command(system, "profile", "--shape", "1,256,2,32", "--causal", "--quick")
    limits = command(system, "limits", "--lengths", "64:128", "--backend", "manual", "--device", "cpu")
    assert "128" in limits
    about = command(system, "doctor")
    if system == "win32":
        assert "native is built for Linux and macOS" in about
