"""Decisions of masks made of data, whose tensors no file holds: recorded, measured by examples, shown and exchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import Blocks, Ranges, attend, record
from attn_dispatch.cli import main
from tests.support.calls import forget

pytestmark = pytest.mark.usefixtures("little_time", "one_thread")


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_recorded_measured_shown_and_exchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], set_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, at = torch.randn(1, 64, 2, 8), torch.arange(64)[None]
    patterns = Blocks(torch.ones(1, 1, 8, 8).tril().bool(), 8), Ranges(at - at, at.clamp(min=1))
    file, bundle = str(tmp_path / "problems.jsonl"), str(tmp_path / "decisions.json")
    set_mode("off")
    with record(file):
        for pattern in patterns:
            attend(q, q, q, pattern)
    set_mode("tune")
    found = json.loads(output(capsys, "profile", "--from", file, "--quick", "--json"))["decisions"]
    assert {each["source"] for each in found} == {"measured"}
    assert sorted(each["problem"].split("   ")[2] for each in found) == [
        "Blocks(8 x 8, table for all, density=0.5, longest row 2x)",
        "Ranges(1 per query, density=0.5, longest row 2x)",
    ]
    keys = {each["key"] for each in found}
    shown = json.loads(output(capsys, "inspect", "--json"))["decisions"]
    assert {each["key"] for each in shown} == keys
    output(capsys, "inspect", "--regret")
    output(capsys, "inspect", "--thresholds")
    output(capsys, "export", bundle)
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "elsewhere"))
    forget()
    output(capsys, "import", bundle)
    assert {each["key"] for each in json.loads(output(capsys, "inspect", "--json"))["decisions"]} == keys
    set_mode("locked")
    for pattern in patterns:
        attend(q, q, q, pattern)
