"""No test reads or leaves a decision outside its own folder, and property tests repeat exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from attn_dispatch import decisions, dispatch, registry, store
from attn_dispatch.backends import flex

settings.register_profile("ci", max_examples=200, derandomize=True, deadline=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-problems", type=int, default=200, help="how many random problems every backend is held to"
    )


@pytest.fixture(autouse=True)
def _own_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that is not there yet, the default settings, and empty tables."""
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "decisions"))
    for name in ("ATTN_DISPATCH_MODE", "ATTN_DISPATCH_BUDGET_MS"):
        monkeypatch.delenv(name, raising=False)
    for table in (dispatch._routes, decisions._decided, decisions._counts, registry._added):
        table.clear()
    for cached in (store._say_once, store.shipped, registry._warn_once):
        cached.cache_clear()


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: several wait for one another where other processes have the cores, which no median evens out."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "300")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda mode: monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend `flex` without its compiler: seconds for each problem, and no gradients on a CPU."""
    flex.release()
    monkeypatch.setattr(flex, "compiling", False)
    yield
    flex.release()
