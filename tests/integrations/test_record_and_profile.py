"""A transformers model recorded, profiled from the record, and run in `locked` mode, which never measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import NotDecided, counters, record
from attn_dispatch.cli import main
from attn_dispatch.recording import read_record
from tests.support.calls import forget
from tests.support.small_transformers import decoder

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("little_time")

PROMPT, NEW, LAYERS = 12, 30, 2


def generated(model: Any, ids: torch.Tensor) -> Any:
    return model.eval().generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)


def step(model: Any, ids: torch.Tensor) -> float:
    model.train().zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def test_record_profile_and_locked(
    tmp_path: Path, set_mode: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = decoder("llama"), tmp_path / "problems.jsonl"
    ids = torch.randint(3, 99, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("sdpa")
    expected = generated(model, ids), step(model, ids)
    model.set_attn_implementation(integration.NAME)
    set_mode("predict")  # records without waiting for trials
    with record(path):
        assert torch.equal(generated(model, ids), expected[0])
        step(model, ids)

    uses = read_record(path)
    calls = {(each.q_len, each.k_len, each.needs_grad): use.calls for each, use in uses.items()}
    # 12 tokens, then 29 times one more; by powers of two of keys: 13 to 16, 17 to 32, 33 to 41.
    assert calls == {
        (PROMPT, PROMPT, False): LAYERS,
        (1, 16, False): 4 * LAYERS,
        (1, 32, False): 16 * LAYERS,
        (1, 64, False): 9 * LAYERS,
        (PROMPT, PROMPT, True): LAYERS,
    }
    assert all(use.seconds > 0 for use in uses.values())

    set_mode("locked")
    forget()
    with pytest.raises(NotDecided):
        generated(model, ids)
    set_mode("tune")
    assert main(["profile", "--from", str(path), "--budget", "5", "--json"]) == 0
    assert [each["source"] for each in json.loads(capsys.readouterr().out)["decisions"]] == ["measured"] * len(uses)

    set_mode("locked")
    forget()
    assert torch.equal(generated(model, ids), expected[0])
    assert step(model, ids) == pytest.approx(expected[1], rel=1e-5)
    assert counters()["measured"] == counters()["heuristic"] == counters()["learned"] == 0
    assert counters()["loaded"] == len(uses)
    with pytest.raises(NotDecided):  # another length of the prompt is another problem
        generated(model, ids[:, :-1])
