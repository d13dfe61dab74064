"""End to end: measured lengths decide the token order at other lengths, with one planted backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain
from attn_dispatch.cli import main
from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Neighborhood
from attn_dispatch.spec.problem import Problem
from tests.support import virtual_clock
from tests.support.calls import counted, forget
from tests.support.planted import Planted
from tests.support.virtual_clock import VirtualClock

MS = 1e-3
CROSSES = 100  #: tokens from which Hilbert order is the faster one
SIDES = (6, 8, 12, 16)


pytestmark = pytest.mark.usefixtures("little_time")


@dataclass
class Crossing(Planted):
    """Natural order takes 4 ms; Hilbert order twice that of short sequences, and a quarter of long ones."""

    name: str = "crossing"
    clock: VirtualClock = field(default_factory=VirtualClock)
    handed: list[str] = field(default_factory=list[str])

    def orders(self, problem: Problem) -> tuple[str, ...]:
        return "natural", "hilbert"

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        order = tensors.pop("order", "natural")
        self.handed.append(order)
        hilbert_ms = 8 if problem.q_len < CROSSES else 1
        self.clock.sleep((4 if order == "natural" else hilbert_ms) * MS)
        return super().run(q, k, v, problem, **tensors)


def qkv(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Neighborhood]:
    q, k, v = (torch.randn(1, rows * columns, 2, 8) for _ in range(3))
    return q, k, v, Neighborhood((rows, columns), (3,))


def test_the_learned_threshold_decides_other_lengths(
    monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Crossing()
    virtual_clock.install(backend.clock, monkeypatch)
    registry._added[backend.name] = backend
    monkeypatch.setattr(registry, "names", lambda: (backend.name,))
    for side in SIDES:
        attend(*qkv(side, side))
    assert counted(measured=len(SIDES))

    assert main(("inspect", "--thresholds", "--json")) == 0
    ((entry,),) = [list(each) for each in [json.loads(capsys.readouterr().out)["thresholds"]]]
    assert (entry["order"], entry["verdict"]) == ("hilbert", "above")
    assert SIDES[1] ** 2 < entry["tokens"] <= SIDES[2] ** 2

    forget()
    set_mode("predict")
    for rows, columns, order in ((5, 9, "natural"), (14, 14, "hilbert"), (30, 31, "hilbert"), (3, 11, "natural")):
        backend.handed.clear()
        attend(*qkv(rows, columns))
        assert backend.handed == [order]
        found = explain(*qkv(rows, columns))
        assert (found.order, found.source) == (order, "learned")
