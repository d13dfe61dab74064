"""`tools.checks.gpu.wheels`: with a stand-in for pip, what is carried in parts is what is installed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tools.checks.gpu import wheels

NOISE = random.Random(0).randbytes(5000)
PIP = f"""
import pathlib, sys, zipfile
version, _, folder = sys.argv[sys.argv.index("--python-version") + 1 :][:3]
pathlib.Path(folder).mkdir(exist_ok=True)
for name, content in (("large", {NOISE!r}), ("small", b"")):
    with zipfile.ZipFile(f"{{folder}}/{{name}}-1-py{{version}}-none-any.whl", "w") as file:
        file.writestr(f"carried_{{name}}.py", f"noise = {{content!r}}")
"""


def test_a_wheel_in_parts_is_installed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(wheels, "MODULES", ("carried_large", "carried_small", "missing"))
    monkeypatch.setattr(sys, "argv", ["wheels", str(tmp_path), "--python", "2.9", "--part-bytes", "600"])
    wheels.main()
    imports = ["import carried_large: ok", "import carried_small: ok"]
    *listed, large, small, missing = capsys.readouterr().out.splitlines()
    assert [large, small] == imports
    assert missing == "import missing: ModuleNotFoundError: No module named 'missing'"
    names = [Path(line.split()[-1]).relative_to(tmp_path).as_posix() for line in listed]
    parts = [f"{number:02}/large-1-py2.9-none-any.whl.{number:02}" for number in range(1, len(names))]
    assert names == ["00/small-1-py2.9-none-any.whl", *parts]
    assert {(tmp_path / part).stat().st_size for part in parts[:-1]} == {600}
    assert wheels.install(tmp_path, tmp_path / "venv")[:2] == imports
    (installed,) = tmp_path.glob("venv/lib/python*/site-packages/carried_large.py")
    assert installed.read_text() == f"noise = {NOISE!r}"
