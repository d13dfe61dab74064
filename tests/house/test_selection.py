"""Which tests a run takes: nothing is left out without a word, and what one run leaves another takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = "pytester"

HOOKS = "pytest_addoption, pytest_configure, pytest_collection_modifyitems, pytest_terminal_summary"
TESTS = """
from hypothesis import given, strategies
from tests.support.pairwise import crossed

@crossed(a=range(3), b=range(3), c=range(3))
def test_many(a, b, c): pass

@given(strategies.booleans())
def test_property(value): pass

def test_plain(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """It has 27 cases, a property and a plain test."""
    profile = settings.get_current_profile_name()
    pytester.makeini("[pytest]\nmarkers =\n    full\n")
    pytester.makeconftest(f"from tests.conftest import {HOOKS}")
    pytester.makepyfile(test_suite=TESTS)
    yield pytester
    settings.load_profile(profile)


@pytest.mark.parametrize(
    ("options", "passed", "left"),
    [
        ((), 11, "18 cases are left to --rest or --all"),
        (("--rest",), 19, "10 cases are left to a run without --rest, or to --all"),
        (("--all",), 29, None),
        (("test_suite.py::test_many",), 27, None),
    ],
    ids=["chosen", "rest", "all", "by-name"],
)
def test_what_a_run_takes(suite: pytest.Pytester, options: tuple[str, ...], passed: int, left: str | None) -> None:
    done = suite.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", *options)
    done.assert_outcomes(passed=passed, deselected=29 - passed if left else 0)
    assert (left or "") in done.stdout.str()
    assert ("left to" in done.stdout.str()) == (left is not None)
