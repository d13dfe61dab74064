"""Fixtures of all tests: none reads or leaves a decision outside its own folder.

Without a CUDA device, Triton's kernels run in its interpreter, but only for the tests that ask for it: elsewhere the
backend refuses the CPU, as it does for users.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
from collections.abc import Callable, Iterator
from itertools import count
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attn_dispatch import process_state
from attn_dispatch.backends import flex
from attn_dispatch.decisions import look_up
from attn_dispatch.kernels import autograd, device_cache
from attn_dispatch.kernels.branches import backend as branched
from attn_dispatch.kernels.flex import attention
from attn_dispatch.kernels.native import library as native_library
from attn_dispatch.machine import environment, load
from attn_dispatch.store import folder as store_folder
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning import clocks, rounds, tuner
from tests.support import calls, fakes, interpreted
from tests.support.fakes import SILICON
from tests.support.interpreted import INTERPRETED

if TYPE_CHECKING:
    from tests.support.ring_ranks import Ranks

MOST_ATTEMPTS = look_up.MOST_ATTEMPTS  #: as it is before a fixture of all tests changes it


if INTERPRETED:
    interpreted.load()


@pytest.fixture(autouse=True, scope="session")
def _machine_without_other_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other programs do decides nothing; fixtures of several tests and late threads store nothing for the user."""
    outside = tmp_path_factory.mktemp("outside")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_DISPATCH_CACHE_DIR", str(outside))
        patch.setattr(load, "involuntary_switches", lambda: 0)
        patch.setattr(load, "is_calm", lambda: True)
        patch.setattr(look_up, "MOST_ATTEMPTS", 0)  # provisional decisions are not measured again
        for each in (torch.cuda, torch.xpu):
            if not each.is_available():  # it would keep the stack, which takes a millisecond to write down
                patch.setattr(each, "manual_seed_all", lambda seed: None)
        yield
    assert list(outside.rglob("*.json")) == [], "stored outside of tests"


@pytest.fixture(autouse=True, scope="module")
def _kept() -> None:
    """What earlier files left stays: no collection of garbage that a test asks for looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for each test that asks for none: to make one takes milliseconds."""
    folder = tmp_path_factory.mktemp("decisions")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def _own_decisions(
    request: pytest.FixtureRequest, _own_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache folder that is not there yet, no shipped profile, the default settings, and empty tables."""
    tmp_path = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else next(_own_folders)
    monkeypatch.setattr(store_folder, "package_files", lambda name: tmp_path / "no profiles")
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "decisions"))
    for name in [*os.environ, "TRITON_INTERPRET"]:
        if name == "TRITON_INTERPRET" or (name.startswith("ATTN_DISPATCH_") and name != "ATTN_DISPATCH_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rounds, "SAID_AFTER_S", math.inf)  # no warning depends on how fast the machine is
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no test cuts the power; a disk takes milliseconds
    calls.forget_all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that is not there yet."""
    return tmp_path / "decisions"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of up to now."""
    caplog.set_level(WARNING, "attn_dispatch")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def anew(folder: Path) -> Callable[[], Quarantine]:
    """The quarantine as a process sees it that has just started."""

    def start() -> Quarantine:
        process_state.forget(process_state.READ)
        return Quarantine(folder, SILICON)

    return start


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without the functions that earlier tests compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """More than the tests' one, and no divisor of most sizes."""
    with calls.threads(3):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors are so small that threads only wait for one another; and allocations are those of this thread."""
    with calls.threads(1):
        yield


@pytest.fixture
def little_time(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread: several wait for one another where other processes have the cores, which no median evens out. Time
    to measure all candidates of a small problem on a busy machine; a resolved race takes a tenth of it.
    """
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "3000")
    monkeypatch.setattr(tuner, "WAITING", tuner.WAITING._replace(fixed_s=3.0))


@pytest.fixture
def short_trials(little_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few rounds as there can be."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")


@pytest.fixture(scope="session")
def _processes() -> Iterator[Callable[[int], Ranks]]:
    from tests.support import ring_ranks  # with torch.distributed: what most tests never use

    yield ring_ranks.ranks_of
    ring_ranks.close_all()


@pytest.fixture
def ranks(_processes: Callable[[int], Ranks]) -> Ranks:
    """Four processes of one process group, and groups of its first ranks."""
    return _processes(4)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with two decisions, and what profile printed when it made them."""
    from tests.support import commands

    folder = tmp_path_factory.mktemp("measured")
    return folder, commands.plain(commands.command(folder, "profile", *commands.TWO, "--quick", "--json"))


def _forget_packages() -> None:
    tables: tuple[Any, ...] = (branched._prepared, environment.installed, branched._load_fault)
    for table in tables:
        table.cache_clear()


@pytest.fixture
def unknown_packages() -> Iterator[None]:
    """Nothing is known of packages, their imports and kernels, neither by the test nor after it."""
    _forget_packages()
    yield
    _forget_packages()


@pytest.fixture
def fresh_machine() -> Iterator[None]:
    """Nothing is known of the machine, neither by the test nor after it."""
    fakes.forget()
    yield
    fakes.forget()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forward passes that backends compute, by the name of their kernels."""
    found: list[str] = []
    original = autograd._PassesFunction.forward

    def forward(ctx: Any, q: Any, k: Any, v: Any, passes: Any, *masks: Any) -> Any:
        if not isinstance(passes, autograd._KnownForward):
            found.append(type(passes).__name__)
        return original(ctx, q, k, v, passes, *masks)

    monkeypatch.setattr(autograd._PassesFunction, "forward", staticmethod(forward))
    return found


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode off: which backend runs is tested elsewhere."""
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "off")


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda mode: monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend `flex` without its compiler: seconds for each problem, and no gradients on a CPU."""
    flex._compiled.cache_clear()
    monkeypatch.setattr(attention, "compiling", False)
    yield
    flex._compiled.cache_clear()


@pytest.fixture
def copying_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that copies the loaded library, with caches cleared as if none was compiled or loaded.

    Gives the user's cache folder; the tests' cache folder, which `$ATTN_DISPATCH_CACHE_DIR` names, is another.
    """
    cxx = tmp_path / "c++"
    cxx.write_text(
        f'#!/bin/sh\necho "$*" >> "$0.log"\nfor last; do :; done\ncp "{native_library.load()._name}" "$last"\n', "utf-8"
    )
    cxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(cxx))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_library, "FOLDER", tmp_path)
    calls.forget_native_library()
    yield tmp_path / "cache" / "attn-dispatch"
    monkeypatch.undo()
    calls.forget_native_library()


@pytest.fixture
def triton_interpreter(_own_decisions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The triton backend takes problems on the CPU, if there is no GPU for it."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Tables on the CPU are kept as on CUDA; `capturing`: a graph is captured; `waits`: what was waited for."""
    waits: list[str] = []
    found = SimpleNamespace(capturing=False, waits=waits, synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(device_cache, "DEVICES", ("cpu",))
    monkeypatch.setattr(device_cache, "_captured", dict[int, object]())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    return found


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether other programs use the cores, from now on; provisional decisions are measured again."""
    switches: Iterator[int] = iter(range(0, 10**9, 50))

    def change(value: bool) -> None:
        monkeypatch.setattr(load, "involuntary_switches", (lambda: next(switches)) if value else lambda: 0)
        monkeypatch.setattr(load, "is_calm", lambda: not value)

    monkeypatch.setattr(look_up, "MOST_ATTEMPTS", MOST_ATTEMPTS)
    monkeypatch.setattr(clocks, "REST_S", 0.0)  # no rest calms what is made up
    return change


@pytest.fixture
def same_diffusers() -> Iterator[None]:
    """set_attention_backend changes the default of the process, too."""
    from tests.support.diffusion import registry

    before = registry._active_backend
    yield
    registry._active_backend = before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The patterns that models of transformers asked attend() for: they may ignore an attention implementation."""
    integration: Any = importlib.import_module("attn_dispatch.integrations.transformers")
    found: list[str] = []
    attend = integration.attend

    def noted(q: Any, k: Any, v: Any, pattern: Any, **more: Any) -> Any:
        if not torch.compiler.is_compiling():
            found.append(str(pattern))
        return attend(q, k, v, pattern, **more)

    monkeypatch.setattr(integration, "attend", noted)
    yield found
    integration.register()
