"""What a run takes, and in how many processes. The fixtures are in `tests/support/fixtures.py`."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest

#: Examples of a property: in every run, and with --all or --rest.
EXAMPLES = {"chosen": 50, "full": 120}

LEFT = pytest.StashKey[int]()  #: how many cases this run leaves out

gc.disable()  # until all is collected: millions of objects are made, and none becomes free

# Started in the background (`nohup`, `&`) a shell has these ignored, and so would every process that a test starts.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-dispatch")
    group.addoption("--all", action="store_true", help="run every case, and every property with more examples")
    group.addoption("--rest", action="store_true", help="run what other runs leave out, of the largest grids the half")
    group.addoption("--random-problems", type=int, help="how many random problems every backend is held to")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        gc.enable()
        return  # the process that starts the others runs no test: it need not load torch
    config.pluginmanager.import_plugin("tests.support.fixtures")
    from hypothesis import settings

    for profile, count in EXAMPLES.items():
        settings.register_profile(profile, max_examples=count, derandomize=True, deadline=None)
    settings.load_profile("full" if config.option.all or config.option.rest else "chosen")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for all of tests/, each and what it starts with one thread; none for files or tests by name."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return min(2, len(os.sched_getaffinity(0)))


def _runs(config: pytest.Config, item: pytest.Item) -> bool:
    many = item.get_closest_marker("exhaustive") is not None
    added = item.get_closest_marker("full") is not None
    if config.option.rest:
        return (added and not many) or item.get_closest_marker("hypothesis") is not None
    return config.option.all or not (added or many)


@pytest.hookimpl(trylast=True)  # Hypothesis has marked its tests then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named is run; of a file or a folder, what is chosen."""
    if any("::" in each for each in config.args):
        return
    left = [item for item in items if not _runs(config, item)]
    items[:] = [item for item in items if _runs(config, item)]
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = len(left)
    output: Any = getattr(config, "workeroutput", None)
    if output is not None:
        output["left"] = len(left)


def pytest_collection_finish() -> None:
    from hypothesis import given
    from hypothesis.strategies import none

    # With the first property Hypothesis makes its generator of random numbers, and warns where it sees nothing refer to
    # it: from Python 3.14 on, that is so once all objects are frozen.
    given(none())(lambda _: None)()
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With several processes each of them collects, and this one adds up."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)  # none where it crashed


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, 0)
    if left:
        other = "--all or a run without --rest" if config.option.rest else "--all or --rest"
        terminalreporter.write_line(f"{left} cases are left to {other}")
