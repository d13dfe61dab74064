"""Backends whose calls take a given time of a virtual clock: added, removed, upgraded, in this process and the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from attn_dispatch import attend, process_state
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from tests.support import virtual_clock
from tests.support.calls import forget, qkv
from tests.support.ordered import stored
from tests.support.planted import Fault, Planted, right
from tests.support.virtual_clock import VirtualClock

MS = 1e-3
LENGTH = 16  #: tokens of the calls that are measured
ENOUGH = 6000  #: calls in which any trial here ends


@dataclass
class Timed(Planted):
    """The reference, whose calls take `takes_s`; with `quick_cases`, those of other lengths than 16 next to nothing."""

    takes_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    quick_cases: bool = False
    missing: str = ""

    def refusals(self, problem: Problem) -> list[Refusal]:
        return [Refusal("not_installed", self.missing)] if self.missing else []

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.clock.sleep(1e-6 if self.quick_cases and problem.q_len != LENGTH else self.takes_s)
        return super().run(q, k, v, problem, **tensors)


class Machine:
    """The only backends, in the order of preference, on one clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, quick_cases: bool = False, **takes_ms: float) -> None:
        self.by_name: dict[str, Timed] = {}
        self.clock, self.quick_cases = VirtualClock(), quick_cases
        virtual_clock.install(self.clock, monkeypatch)
        monkeypatch.setattr(registry, "names", lambda: tuple(self.by_name))
        for name, takes in takes_ms.items():
            self.add(name, takes)

    def add(self, name: str, takes_ms: float, edition: str = "1", work: float = 1000.0, fault: Fault = right) -> Timed:
        found = Timed(fault, name, edition=edition, takes_s=takes_ms * MS, clock=self.clock)
        found.quick_cases = self.quick_cases
        if self.quick_cases:  # in calls of `a`, which has 1000: its own rate is unknown before
            found.flops = lambda problem: work
        registry._added[name] = self.by_name[name] = found
        return found

    def remove(self, name: str) -> None:
        del registry._added[name], self.by_name[name]

    def restart(self, *, knows_nothing: bool = False) -> None:
        """As a new process; one of another machine has passed no hard cases."""
        if knows_nothing:
            process_state.forget_all()
            registry._added.update(self.by_name)
        else:
            forget()
        for backend in self.by_name.values():
            backend.calls = 0
            backend.seen.clear()

    def calls(self) -> dict[str, int]:
        return {name: backend.calls for name, backend in self.by_name.items()}

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """The calls since then."""
        return {name: count - before[name] for name, count in self.calls().items()}

    def called(self) -> set[str]:
        """The backends that were measured."""
        return {name for name, count in self.calls().items() if count > 1}


def row(name: str) -> Row:
    """That of a backend in the stored decision."""
    return next(each for each in stored().candidates if each.backend == name)


def call_until_measured(call: Callable[[], Any] = lambda: attend(*qkv())) -> int:
    """The calls that were made."""
    for number in range(ENOUGH):
        if list(Store(cache_folder()).all()):
            return number
        call()
    raise AssertionError("the trial did not end")
