"""Candidates are pairs of backend and token order: measured, chosen, stored, forced and quarantined as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from attn_dispatch import Blocks, attend, explain, profile
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.quarantine import Quarantine
from tests.support.calls import counted, forget, qkv
from tests.support.ordered import HILBERT, NATURAL, OTHER, RESIDUE, Installed, replace_stored, right, rows, stored

pytestmark = pytest.mark.usefixtures("little_time")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(monkeypatch)


# --- measured and stored ----------------------------------------------------------------------------------------------


def test_both_orders_are_measured_and_the_faster_is_taken(installed: Installed) -> None:
    q, k, v = qkv()
    profile([Problem.of(q, k, v)], budget_s=3.0, progress=False)
    assert right(attend(q, k, v), q, k, v)
    assert stored().chosen == HILBERT
    assert set(rows()) == {OTHER, NATURAL, HILBERT}
    assert all(row.median_ms is not None and row.error is not None for row in rows().values())
    assert [rows()[name].status for name in (OTHER, NATURAL)] == ["slower", "slower"]
    installed.restart()
    attend(q, k, v)
    attend(q, k, v)
    assert installed.tiled.handed == [{"order": "hilbert"}] * 2
    assert counted(loaded=1)
    assert installed.other.handed == []


def test_natural_order_is_not_passed_to_the_backend(installed: Installed) -> None:
    """Nor to a backend without `orders`."""
    installed.tiled.times_ms = {"natural": 1, "hilbert": 6}
    attend(*qkv())
    assert stored().chosen == NATURAL
    assert installed.tiled.orders_run() == {None, "hilbert"}
    assert not any("order" in each for each in installed.other.handed)
    installed.restart()
    attend(*qkv())
    assert installed.tiled.handed == [{}]


def test_with_gradients_masks_and_layout_bhnd(installed: Installed) -> None:
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv())
    options: dict[str, Any] = {"layout": "bhnd", "key_mask": torch.ones(1, 16, dtype=torch.bool)}
    out = attend(q, k, v, **options)
    assert stored().chosen == HILBERT
    assert installed.tiled.handed[-1].keys() == {"order", "key_mask"}
    out.sum().backward()
    found, q.grad = q.grad, None
    attend(q, k, v, **options, backend="other").sum().backward()
    assert found is not None
    assert q.grad is not None
    assert torch.allclose(found, q.grad)


def test_an_upgrade_measures_all_orders_again(installed: Installed) -> None:
    attend(*qkv())
    installed.restart()
    installed.tiled.edition = "2"
    installed.tiled.times_ms = {"natural": 2, "hilbert": 8}
    attend(*qkv())
    assert counted(measured=1)
    assert installed.tiled.orders_run() == {None, "hilbert"}
    assert (stored().chosen, rows()[HILBERT].version, rows()[NATURAL].version) == (NATURAL, "2", "2")


def test_only_a_new_order_is_measured(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offered orders are read again when the environment has changed."""
    installed.tiled.offered = lambda problem: ("natural",)
    attend(*qkv())
    assert stored().chosen == OTHER
    before = rows()[NATURAL]
    installed.restart()
    installed.tiled.offered = lambda problem: ("natural", "hilbert")
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    attend(*qkv())
    assert counted(measured=1)
    assert installed.tiled.orders_run() == {"hilbert"}
    assert stored().chosen == HILBERT
    assert rows()[NATURAL].measured == before.measured


def test_an_order_that_is_no_longer_offered(installed: Installed, set_mode: Callable[[str], None]) -> None:
    attend(*qkv())
    set_mode("predict")
    installed.restart()
    installed.tiled.offered = lambda problem: ("natural",)
    attend(*qkv())
    assert installed.tiled.handed == []
    found = explain(*qkv())
    assert (found.choice, found.order, found.source) == (*OTHER, "measured")
    assert counted(loaded=1)


def test_an_order_skipped_for_time_is_measured_later(installed: Installed) -> None:
    attend(*qkv())
    late = [msgspec.structs.replace(row, status="not_measured", median_ms=None, low_ms=None, high_ms=None, need_ms=1)
            if row.id == NATURAL else row for row in stored().candidates]  # fmt: skip
    replace_stored(candidates=tuple(late), budget_ms=0.5)
    installed.restart()
    attend(*qkv())
    assert installed.tiled.orders_run() == {None, "hilbert"}
    assert installed.other.handed == []
    assert rows()[NATURAL].median_ms is not None


def test_a_neighbour_is_predicted_in_its_order(installed: Installed, set_mode: Callable[[str], None]) -> None:
    attend(*qkv(16))
    set_mode("predict")
    installed.restart()
    attend(*qkv(17))
    assert counted(learned=1)
    assert installed.tiled.last() == "hilbert"
    found = explain(*qkv(17))
    assert (found.choice, found.order, found.source) == (*HILBERT, "learned")


def test_another_density_is_predicted(installed: Installed, set_mode: Callable[[str], None]) -> None:
    """Of masks made of data, measured at a denser and a sparser one."""

    def a_quarter(of: int) -> Blocks:
        return Blocks((torch.arange(16) < of).expand(1, 1, 16, 16), 1)

    for columns in (2, 8):
        attend(*qkv(16), a_quarter(columns))
    assert counted(measured=2)
    set_mode("predict")
    installed.restart()
    attend(*qkv(16), a_quarter(4))
    assert counted(learned=1)


# --- forced -----------------------------------------------------------------------------------------------------------


def run_and_explain(installed: Installed, **options: Any) -> tuple[str, str]:
    """The candidate that runs a call; its result must be right, and explain() must name it."""
    q, k, v = qkv()
    for backend in (installed.other, installed.tiled):
        backend.handed.clear()
    assert right(attend(q, k, v, **options), q, k, v)
    runs = {backend.name: backend.handed for backend in (installed.other, installed.tiled) if backend.handed}
    ((name, handed),) = runs.items()
    ((order,),) = [[each.get("order", "natural") for each in handed]]
    found = explain(q, k, v, **options)
    assert (found.choice, found.order, found.source) == (name, order, "forced")
    assert [(row.backend, row.order) for row in found.candidates if row.status == "chosen"] == [(name, order)]
    return name, order


@pytest.mark.parametrize(
    ("options", "expected", "measured"),
    [
        ({"order": "hilbert"}, HILBERT, HILBERT),
        ({"order": "natural"}, OTHER, OTHER),
        ({"backend": "tiled"}, NATURAL, HILBERT),
        ({"backend": "other"}, OTHER, OTHER),
        ({"backend": "tiled", "order": "natural"}, NATURAL, NATURAL),
        ({"backend": "tiled", "order": "hilbert"}, HILBERT, HILBERT),
        ({"backend": "tiled", "order": "residue"}, RESIDUE, RESIDUE),
    ],
    ids=str,
)
def test_forced_backends_and_orders(
    options: dict[str, Any], expected: tuple[str, str], measured: tuple[str, str], installed: Installed
) -> None:
    """Nothing is measured: first the static choice runs, later the best of what another call measured."""
    assert run_and_explain(installed, **options) == expected
    assert counted(forced=1)
    assert not cache_folder().exists()
    forget()
    attend(*qkv())
    assert run_and_explain(installed, **options) == measured
    forget()
    assert run_and_explain(installed, **options) == measured
    assert counted(forced=1)


def test_the_fastest_in_the_forced_order_need_not_be_the_fastest(installed: Installed) -> None:
    installed.tiled.times_ms = {"natural": 2, "hilbert": 1}
    attend(*qkv())
    assert stored().chosen == HILBERT
    forget()
    assert run_and_explain(installed, order="natural") == NATURAL
    found = explain(*qkv(), order="natural")
    assert [(row.backend, row.order, row.status) for row in found.candidates] == [
        (*OTHER, "slower"),
        (*NATURAL, "chosen"),
    ]
    assert all(row.median_ms is not None for row in found.candidates)


def test_an_order_that_no_backend_offers(installed: Installed) -> None:
    q, k, v = qkv()
    with pytest.raises(NoBackend) as raised:
        attend(q, k, v, order="residue")
    lines = str(raised.value).splitlines()
    assert lines[0] == "no backend can run Dense() in residue order on cpu in float32:"
    assert lines[2:] == [
        "  other: computes in natural order only",
        "  tiled: offers residue order only if forced: add backend='tiled'",
        "Pass order=None to let every order be tried.",
    ]
    found = explain(q, k, v, order="residue")
    assert (found.choice, found.order, found.source) == (None, None, "forced")
    assert [(row.order, row.status) for row in found.candidates] == [("residue", "unsupported")] * 2


def test_a_forced_order_of_a_backend_that_refuses(installed: Installed) -> None:
    installed.tiled.reasons = [Refusal("moon", "not at full moon")]
    both: list[dict[str, Any]] = [{"order": "hilbert"}, {"order": "hilbert", "backend": "tiled"}]
    for options in both:
        with pytest.raises(NoBackend, match="tiled: not at full moon"):
            attend(*qkv(), **options)
    assert run_and_explain(installed, order="natural") == OTHER


@pytest.mark.parametrize("order", ["random", "natural ", 3])
def test_an_invalid_order_is_reported_first(order: Any, installed: Installed) -> None:
    for backend in (None, "other"):
        with pytest.raises(InvalidInput, match="order must be None or one of"):
            attend(*qkv(), order=order, backend=backend)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_every_row_has_its_order(installed: Installed) -> None:
    assert [(row.backend, row.order) for row in explain(*qkv()).candidates] == [OTHER, NATURAL, HILBERT]
    attend(*qkv())
    found = explain(*qkv())
    lines = [line for line in str(found).splitlines() if line[:1].strip()][-3:]
    assert [tuple(line.split()[:2]) for line in lines] == [OTHER, NATURAL, HILBERT]
    assert "choice    tiled in hilbert order (measured)" in str(found)
    assert found.to_dict()["candidates"][2]["order"] == "hilbert"


def test_failures_name_the_order(installed: Installed, set_mode: Callable[[str], None]) -> None:
    del installed.tiled.times_ms["hilbert"]
    with pytest.raises(BackendFailed, match=r"tiled@hilbert failed on \[1, 16, 2, 8\]"):
        attend(*qkv(), order="hilbert")


# --- quarantined ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["natural", "hilbert"])
def test_wrong_results_in_one_order_quarantine_all(wrong: str, installed: Installed) -> None:
    """A quarantine applies to a version of the backend."""
    installed.tiled.wrong_in = wrong
    q, k, v = qkv()
    assert right(attend(q, k, v), q, k, v)
    assert stored().chosen == OTHER
    bad, good = (NATURAL, HILBERT) if wrong == "natural" else (HILBERT, NATURAL)
    assert (rows()[bad].status, rows()[good].status) == ("incorrect", "quarantined")
    assert "out is off by" in rows()[bad].reason
    assert rows()[bad].reason in rows()[good].reason
    entry = Quarantine(cache_folder(), stored().silicon).find("tiled", "1", stored().group)
    assert entry is not None
    assert ("hilbert order" in entry.title) == (wrong == "hilbert")
    installed.restart()
    attend(q, k, v)
    assert counted(loaded=1)
    assert installed.tiled.handed == []


def test_hard_cases_run_in_the_order_if_it_is_offered(installed: Installed) -> None:
    installed.tiled.offered = lambda problem: ("natural", "hilbert") if problem.q_len in (16, 77) else ("natural",)
    attend(*qkv())
    by_order: dict[str | None, set[int]] = {}
    for handed, problem in zip(installed.tiled.handed, installed.tiled.seen, strict=True):
        by_order.setdefault(handed.get("order"), set()).add(problem.q_len)
    assert stored().chosen == HILBERT
    assert by_order == {"hilbert": {16, 77}, None: {16}}, "only the chosen candidate runs the hard cases"


@pytest.mark.parametrize(
    ("offered", "status", "reason"),
    [
        (lambda problem: ("natural", "spiral"), "failed", "not 'spiral'"),
        (lambda problem: 1 / 0, "failed", "ZeroDivisionError"),
        (lambda problem: (), "unsupported", "offers no order"),
    ],
    ids=["unknown", "raises", "none"],
)
def test_invalid_orders(offered: Callable[[Problem], Any], status: str, reason: str, installed: Installed) -> None:
    installed.tiled.offered = offered
    attend(*qkv())
    assert stored().chosen == OTHER
    found = {(row.backend, row.order): row for row in explain(*qkv()).candidates}
    assert found.keys() == {OTHER, NATURAL}
    assert found[NATURAL].status == status
    assert reason in found[NATURAL].reason


def test_a_backend_without_natural_order(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The static choice prefers natural order, but takes another if there is none."""
    monkeypatch.setattr(registry, "names", lambda: ("tiled", "other"))
    installed.tiled.offered = lambda problem: ("hilbert",)
    assert explain(*qkv()).choice == "other"
    installed.other.reasons = [Refusal("moon", "not at full moon")]
    found = explain(*qkv())
    assert (found.choice, found.order, found.source) == (*HILBERT, "heuristic")
