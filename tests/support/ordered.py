"""One backend with orders and one without, whose calls take a given time of a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from attn_dispatch.kernels import registry
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.folder import Store
from tests.support import virtual_clock
from tests.support.calls import close, forget, formula
from tests.support.planted import Planted
from tests.support.virtual_clock import VirtualClock

MS = 1e-3
DISTURBED = "other programs took the cores while it was measured"
OTHER = ("other", "natural")
NATURAL, HILBERT, RESIDUE = (("tiled", order) for order in ("natural", "hilbert", "residue"))


@dataclass
class TimedBackend(Planted):
    """A backend without orders. `handed` are the keyword arguments of its calls."""

    takes_data: bool = True
    takes_ms: float = 4
    clock: VirtualClock = field(default_factory=VirtualClock)
    handed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        self.handed.append(tensors)
        self.clock.sleep(self.takes_ms * MS)
        return super().run(q, k, v, problem, **tensors)


@dataclass
class OrderedBackend(TimedBackend):
    """A backend whose time depends on the order; its results in `wrong_in` are off by 1 %."""

    name: str = "tiled"
    times_ms: dict[str, float] = field(default_factory=lambda: {"natural": 6, "hilbert": 1, "residue": 9})
    offered: Callable[[Problem], Any] = lambda problem: ("hilbert", "natural")
    all_orders: tuple[str, ...] = ("residue",)
    wrong_in: str = ""
    preparations: int = 0
    forgotten: list[Problem] = field(default_factory=list[Problem])

    def orders(self, problem: Problem) -> Any:
        return self.offered(problem)

    def prepare(self) -> None:
        self.preparations += 1

    def forget(self, problem: Problem) -> None:
        self.forgotten.append(problem)

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        order = tensors.get("order", "natural")
        self.takes_ms = self.times_ms[order]
        out, lse = super().run(q, k, v, problem, **tensors)
        return (out * 1.01 if order == self.wrong_in else out), lse

    def last(self) -> str | None:
        return self.handed[-1].get("order")

    def orders_run(self) -> set[str | None]:
        return {each.get("order") for each in self.handed}


class Installed:
    """A registry of one backend with orders and one without; `restart` simulates a new process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = VirtualClock()
        virtual_clock.install(clock, monkeypatch)
        self.other, self.tiled = TimedBackend(name="other", clock=clock), OrderedBackend(clock=clock)
        for backend in (self.other, self.tiled):
            registry._added[backend.name] = backend
        monkeypatch.setattr(registry, "names", lambda: ("other", "tiled"))

    def restart(self) -> None:
        forget()
        for backend in (self.other, self.tiled):
            backend.handed.clear()


def stored() -> Decision:
    ((_, decision),) = Store(cache_folder()).all()
    return decision


def replace_stored(**changes: Any) -> None:
    """Store another decision in its place."""
    decision = stored()
    Store(cache_folder()).path(*decision.address).unlink()
    Store(cache_folder()).put(replace(decision, **changes))


def rows() -> dict[tuple[str, str], Row]:
    return {row.id: row for row in stored().candidates}


def right(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return close(out, formula(q, k, v, Dense())[0])
