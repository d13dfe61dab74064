"""What the README shows of `plan`, and of what it projects, is what is counted today."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from attn_dispatch.spec.orders import EXCHANGES, LOCAL
from tools.bench import plan_examples, projections
from tools.bench.projections import DTYPES, GTX_1080, REPORTED, far, made_up, near, projected
from tools.lib.common import RESULTS

PLAN = json.loads((RESULTS / "plan.json").read_text())
PROJECTED = json.loads((RESULTS / "projections.json").read_text())
PASSES = ("forward", "backward")


def test_the_example_is_the_printed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: scratch memory goes by threads."""
    threads = PLAN["hardware"]["cpu"]["threads"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert PLAN["command"] == plan_examples.COMMAND
    assert plan_examples.printed(PLAN["command"]) == PLAN["lines"]


def test_a_wrong_example_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        plan_examples.printed("attn-dispatch plan --tokens 2 --ranks 4 --link 1 --rate 1")


# --- projections ------------------------------------------------------------------------------------------------------


def test_every_reported_row_is_there() -> None:
    expected = [(row.device.name, row.ranks, row.tokens, row.title) for row in REPORTED]
    columns = ("device", "ranks", "tokens", "reported")
    rows = {name: [tuple(one[column] for column in columns) for one in PROJECTED[name]] for name in ("near", "far")}
    assert rows["near"] == [row for row in expected for _ in DTYPES]
    assert rows["far"] == [row for row in expected if row[1] > 1]
    assert {one["dtype"] for one in PROJECTED["near"]} == {"float16", "float32"}


def test_projections_agree_with_themselves() -> None:
    """What fits is no longer than the longest; segments that end with shards have nothing to ship, the others have."""
    for name in ("near", "far"):
        for one in PROJECTED[name]:
            memory = PROJECTED["devices"][one["device"]]
            for each in (one[which] for which in PASSES):
                assert each["fits"] == (each["peak_bytes"] <= memory) == (one["tokens"] <= each["longest_tokens"])
                assert each["longest_tokens"] % (max(projections.SEGMENTS) * one["ranks"]) == 0
                assert (each["shipped_bytes"] == 0) == (each["exchange"] == LOCAL) == (name == "near")
                assert each["exchange"] in EXCHANGES
            assert one["backward"]["peak_bytes"] > one["forward"]["peak_bytes"]


@pytest.mark.parametrize("number", [0, 1], ids=["one", "two"])
def test_a_row_counted_again(number: int) -> None:
    row = REPORTED[number]
    assert row.device is GTX_1080
    with made_up():
        assert projected(row, near, torch.float32) == PROJECTED["near"][2 * number + 1]
        assert number == 0 or projected(row, far, torch.float16) == PROJECTED["far"][0]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_another_device_has_another_kernel() -> None:
    with made_up():
        kernels = [projections.kernel(row, near, dtype) for row in REPORTED for dtype in DTYPES]
    assert kernels == [one["kernel"] for one in PROJECTED["near"]]
    assert {*zip(kernels, (one["device"] for one in PROJECTED["near"]))} == {("sdpa", "GTX 1080"), ("triton", "A100")}
