"""What a user is told where the library of an integration is missing or too old."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from attn_dispatch.integrations.libraries import library


@pytest.mark.parametrize("name", ["transformers", "diffusers"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = rf"^attn_dispatch.integrations.{name} needs {name} 5.4 or newer: pip install '{name}>=5.4' "
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{needed}\({name} is not installed\)$"):
        library(name, "5.4")
    old = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, old)
    for version, is_enough in (("4.57.1", False), ("5.3.0", False), ("5.4.0", True), ("5.12.0", True), ("6.0", True)):
        monkeypatch.setattr(old, "__version__", version, raising=False)
        if is_enough:
            assert library(name, "5.4") is old
        else:
            with pytest.raises(ImportError, match=rf"{needed}\({version} is installed\)$"):
                library(name, "5.4")


def test_what_a_library_lacks_itself_is_left_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_library.py").write_text("import a_module_that_is_nowhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
        library("broken_library", "1.0")
