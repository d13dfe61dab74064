"""Run with `pytest`: everything that attn-dispatch relies on, at once; then some problems more, a test for each."""

import blocked_window
import pytest

from attn_dispatch.testing import conformance, random_problems

PROBLEMS = [problem for problem in random_problems(seed=1, count=4000) if not blocked_window.refusals(problem)]


def test_conformance():
    assert len(conformance(blocked_window).computed) >= 5


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem):
    conformance(blocked_window, [problem])
