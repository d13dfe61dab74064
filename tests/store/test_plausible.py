"""Times below the least work of a problem at its machine's peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from attn_dispatch import Dilated, Neighborhood, Window, cli
from attn_dispatch.ring.plan.counts import count_layout
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.address import Address
from attn_dispatch.store.bundle import write_bundle
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.folder import Store
from attn_dispatch.store.plausible import impossible_time, least_time_ms
from tests.support.entries import decision

CPU = "cpu-amd-epyc-avx512_bf16-2c-2t"
PATTERNS = (
    Dense(),
    Dense(is_causal=True),
    Window(0, 0),
    Window(7, 7, sinks=3),
    Window(None, 0),
    Dilated((16, 32, 64), (1, 2, 4)),
    Dilated((16, 64), (3, 5), is_causal=True),
    Dilated((16, 64, 10), (2, 4, 1), heads="split"),
    Dilated((10, 200), (7, 99), is_causal=True),
    Neighborhood((8, 12), (3, 5)),
    Neighborhood((8, 12), (7, 11), dilation=(3, 5)),
    Neighborhood((8, 12), (4, 6), (2, 1), (True, False), "shift", (4, 5)),
)


def plain(pattern: Pattern = Dense(), length: int = 96, backward: bool = False) -> dict[str, Any]:  # noqa: B008
    return problem_of((2, length, 4, 64), pattern, torch.float32, torch.device("cpu"), backward=backward).to_dict()


def of(median_ms: float, silicon: str = CPU, **changes: Any) -> Decision:
    row = Row(backend="sdpa", order="natural", status="chosen", median_ms=median_ms)
    return decision(silicon=silicon, candidates=(row,), problem={**plain(length=8192), **changes})


def placed(decision: Decision) -> Decision:
    return replace(decision, **Address.of(decision.problem, decision.silicon)._asdict())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_work_is_counted_from_below(pattern: Pattern) -> None:
    problem = problem_of((2, 96, 4, 64), pattern, torch.float32, torch.device("cpu"))
    pairs = count_layout(problem.pattern, Layout((96,)), 4, 4).pairs[0][0]
    at_peak_ms = 4 * 2 * 64 * pairs / (2 * 6e9 * 64) * 1e3
    assert 0 < least_time_ms(problem.to_dict(), CPU) <= at_peak_ms
    if isinstance(pattern, Dense):
        assert least_time_ms(problem.to_dict(), CPU) >= at_peak_ms / 2


@pytest.mark.parametrize(
    ("silicon", "factor"),
    [
        (CPU, 1),
        ("cpu-amd-epyc-avx512_bf16-4c-2t", 2),
        ("cpu-intel-amx_bf16-2c-2t", 64),
        ("cuda-sm90-132sm-50mib-l2-80gib-nvidia-h100-80gb-hbm3", 132 * 3e9 * 16384 / (2 * 6e9 * 64)),
    ],
)
def test_the_peak_of_a_machine(silicon: str, factor: float) -> None:
    assert least_time_ms(plain(), silicon) == pytest.approx(least_time_ms(plain(), CPU) / factor)


def test_what_is_not_known_refuses_nothing() -> None:
    assert impossible_time(of(0.0, "ring-4r-1h-zigzag-0123456789ab")) == ""
    assert impossible_time(decision()) == ""
    damaged: dict[str, Any] = {"heads": "x" * 9, "q_len": None, "pattern": {"kind": "Spiral"}, "batch": 10**400}
    for name in damaged:
        assert impossible_time(of(0.0, **{name: damaged[name]})) == ""


def test_times_at_the_bound() -> None:
    least_ms = least_time_ms(plain(length=8192), CPU)
    assert impossible_time(of(1.01 * least_ms)) == ""
    assert "of sdpa is impossible" in impossible_time(of(0.99 * least_ms))


def test_an_import_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true, forged = placed(of(1e4)), placed(of(1.0, "cpu-other-avx2-1c-1t"))
    (tmp_path / "given.json").write_bytes(write_bundle([true, forged]))
    assert cli.main(["import", str(tmp_path / "given.json"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["added"], found["refused"]) == (1, 1)
    assert "1 ms of sdpa is impossible: this problem takes" in found["sources"][0]["reasons"][0]["reason"]
    assert [each.silicon for _, each in Store(cache_folder()).all()] == [CPU]
