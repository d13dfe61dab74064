"""What a run takes, and in how many processes. The fixtures are in `tests/support/fixtures.py`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import Any

import pytest

#: Examples of a property: in every run, and with --rest or --all.
EXAMPLES = {"chosen": 20, "full": 100}

#: What takes a minute or so: a process that had such a test left at the end would run alone.
LONG = ("test_native_sanitized", "test_native_builds", "test_flex", "test_gpu_check")

LEFT = pytest.StashKey[int]()  #: how many cases this run leaves out

gc.set_threshold(100_000)  # millions of objects are made while tests are collected, and few become free

# Started in the background (`nohup`, `&`) a shell has these ignored, and so would every process that a test starts.
for number in (getattr(signal, name, signal.SIGINT) for name in ("SIGINT", "SIGQUIT", "SIGHUP")):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-dispatch")
    group.addoption("--all", action="store_true", help="run what --rest runs, and what it leaves out")
    group.addoption("--rest", action="store_true", help="run what others leave out, properties with more examples")
    group.addoption("--random-problems", type=int, help="how many random problems every backend is held to")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        # Each process and what it starts computes in one thread, or in more that sleep: all wait for the same cores.
        os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ)
        return  # the process that starts the others runs no test: it need not load torch
    config.pluginmanager.import_plugin("tests.support.fixtures")
    from hypothesis import settings

    for profile, count in EXAMPLES.items():
        settings.register_profile(profile, max_examples=count, derandomize=True, deadline=None)
    settings.load_profile("full" if config.option.all or config.option.rest else "chosen")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for all of tests/; none for files or tests by name."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(2, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def _runs(config: pytest.Config, item: pytest.Item) -> bool:
    if config.option.rest:
        return any(item.iter_markers("full")) or item.get_closest_marker("hypothesis") is not None
    return config.option.all or not any(item.iter_markers("full"))


@pytest.hookimpl(trylast=True)  # Hypothesis has marked its tests then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named is run; of a file or a folder, what is chosen, long tests first."""
    if any("::" in each for each in config.args):
        return
    runs = {item: _runs(config, item) for item in items}
    left = [item for item in items if not runs[item]]
    items[:] = sorted((item for item in items if runs[item]), key=lambda item: item.path.stem not in LONG)
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = len(left)
    output: Any = getattr(config, "workeroutput", None)
    if output is not None:
        output["left"] = len(left)


def pytest_collection_finish() -> None:
    """What is there by now stays: a collection of garbage that a test asks for would look at all of it, for 0.5 s."""
    gc.freeze()
    for each in logging.root.manager.loggerDict.values():
        if isinstance(each, logging.Logger):  # else pytest attaches itself to 50 of torch's, six times a test
            each.propagate = True


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With several processes each of them collects, and this one adds up."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)  # none where it crashed


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, 0)
    if left:
        other = "a run without --rest, or to --all" if config.option.rest else "--rest or --all"
        terminalreporter.write_line(f"{left} cases are left to {other}")
