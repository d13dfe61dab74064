"""An entry point whose import fails, exits, hangs or crashes neither ends nor stalls the program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn_dispatch import attend, explain, process_state
from attn_dispatch.cli import main
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.quarantine import Entry, Quarantine
from tests.support import processes
from tests.support.calls import close, formula, qkv

pytestmark = pytest.mark.usefixtures("short_trials")

WORKS = """
from attn_dispatch.backends import manual
name, version, refusals, workspace_bytes, run = (
    "plug", lambda: "1", manual.refusals, manual.workspace_bytes, manual.run
)
"""
COUNTED = "with open(__file__ + '.imports', 'a') as file: file.write('x')\n"
FAILING = {
    "error": ("raise ValueError('no')", "ValueError: no"),
    "missing": ("import nowhere_at_all", "ModuleNotFoundError"),
    "exit": ("raise SystemExit(3)", "raised SystemExit: 3"),
    "interrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "nothing": ("", "lacks name, version"),
    "hangs": ("import time\nwhile True: time.sleep(0.001)", "did not return within 0.1 s"),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Install a distribution whose entry point is a module with this code; returns the file that counts its imports."""
    site = tmp_path / "site"
    package = site / "made_up-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[attn_dispatch.backends]\nplug = plugged_in\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "0.1")
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)

    def made(code: str) -> Path:
        path = site / "plugged_in.py"
        path.write_text(COUNTED + code)
        return path.with_name(path.name + ".imports")

    yield made
    registry._load.cache_clear()
    sys.modules.pop("plugged_in", None)


def entries() -> list[Entry]:
    return Quarantine(cache_folder(), silicon("cpu")).entries()


@pytest.mark.parametrize(("code", "reason"), FAILING.values(), ids=FAILING)
def test_a_failing_import(
    code: str, reason: str, install: Callable[[str], Path], warnings: Callable[[], list[str]]
) -> None:
    """It is tried once in a process, and one warning names the entry point and its distribution."""
    imports = install(code)
    for length in (16, 24):
        q, k, v = qkv(length)
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    (text,) = warnings()
    assert text.startswith("backend 'plug' (entry point plugged_in of made-up 1) ")
    assert reason in text
    assert imports.read_text() == "x"
    with pytest.raises(InvalidInput, match="entry point plugged_in of made-up 1"):
        attend(*qkv(), backend="plug")


def test_an_import_that_hangs_is_left_out_by_later_processes(
    install: Callable[[str], Path], warnings: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    imports = install(FAILING["hangs"][0])
    attend(*qkv())
    (entry,) = entries()
    assert (entry.backend, entry.version, entry.kind, entry.strikes) == ("import of plug", "made-up 1", "hung", 1)
    process_state.forget_all()
    attend(*qkv(24))
    assert imports.read_text() == "x"
    assert "lift 'import of plug'" in warnings()[-1]
    assert main(["doctor", "--lift", "import of plug"]) == 0
    assert capsys.readouterr().out.startswith("lifted    import of plug made-up 1 on ")
    imports.with_suffix("").write_text(WORKS)
    process_state.forget_all()
    assert any(row.backend == "plug" and row.status != "failed" for row in explain(*qkv()).candidates)


@pytest.mark.full
@pytest.mark.usefixtures("little_time")
def test_an_import_that_crashes_is_left_out_by_later_processes(install: Callable[[str], Path]) -> None:
    imports = install("import os; os.abort()")
    code = "import torch, attn_dispatch\nx = torch.ones(1, 16, 1, 8)\nattn_dispatch.attend(x, x, x)\nprint('done')"
    code = "import os, sys; sys.path.insert(0, os.environ['PYTHONPATH'])\n" + code
    for _ in range(2):
        assert processes.run(code).returncode < 0
    done = processes.run(code)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert imports.read_text() == "xx"
    (entry,) = entries()
    assert (entry.backend, entry.kind) == ("import of plug", "died")
    assert "import of plug made-up 1 ran the entry point plugged_in for the first time" in entry.reason
