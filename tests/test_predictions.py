"""What the README shows of `plan` is what `plan` says today."""

from __future__ import annotations

import json

import pytest
import torch

from tools import plan_examples
from tools.common import RESULTS

PLAN = json.loads((RESULTS / "plan.json").read_text())


def test_the_example_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: scratch memory goes by threads."""
    threads = PLAN["hardware"]["cpu"]["threads"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert PLAN["command"] == plan_examples.COMMAND
    assert plan_examples.printed(PLAN["command"]) == PLAN["lines"]


def test_a_wrong_example_is_none() -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        plan_examples.printed("attn-dispatch plan --tokens 2 --ranks 4 --link 1 --rate 1")
