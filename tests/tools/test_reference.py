"""The API reference: pdoc makes it without a warning, and every public name is on its page."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.processes import printed
from tools.docs import reference


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("pdoc") is None:
        pytest.skip("pdoc is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("reference")
    # In a process of its own: modules of integrations register themselves when they are imported.
    printed("-m", "tools.docs.reference", "-o", str(folder))
    return folder


@pytest.mark.parametrize("name", ["attn_dispatch", "attn_dispatch.nn", "attn_dispatch.compat", "attn_dispatch.testing"])
def test_every_public_name_is_documented(pages: Path, name: str) -> None:
    page = (pages / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")
    parts = {match[1]: match[2] for match in re.finditer(r'<section id="(\w+)">(.*?)</section>', page, flags=re.DOTALL)}
    wanted = set(importlib.import_module(name).__all__) - {"nn"}
    assert {each for each in wanted if '<div class="docstring">' in parts.get(each, "")} == wanted


def test_a_reference_to_nothing_fails(pages: Path, tmp_path: Path) -> None:
    """As a module whose `__all__` names what it does not have."""
    code = (
        "import sys, attn_dispatch.errors\n"
        "from pathlib import Path\n"
        "from tools.docs import reference\n"
        "attn_dispatch.errors.__all__ = ['Missing']\n"
        "print(reference.write(Path(sys.argv[1]), ['attn_dispatch.errors']))"
    )
    assert "Missing" in printed("-c", code, str(tmp_path))


def test_modules_are_there() -> None:
    assert all(importlib.util.find_spec(name) for name in reference.MODULES)
