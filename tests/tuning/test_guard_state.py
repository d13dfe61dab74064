"""A guarded call runs in the caller's state and does not change it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attn_dispatch.tuning.guard import run_guarded
from tests.support.guarded import PATIENT_S

pytestmark = pytest.mark.usefixtures("no_threads_are_left")


def surroundings() -> dict[str, object]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(1).device,
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STATES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "threads": lambda: threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_call_runs_in_the_callers_state(state: Callable[[], Any]) -> None:
    """In a thread that has run kernels before, which does not follow the others' number of threads any more."""
    plain = run_guarded(surroundings, PATIENT_S)
    assert plain == surroundings()
    with state():
        wanted = surroundings()
        assert (wanted != plain) is (state is not contextlib.nullcontext)
        assert run_guarded(surroundings, PATIENT_S) == wanted
        assert run_guarded(lambda: run_guarded(surroundings, PATIENT_S), PATIENT_S) == wanted
    assert run_guarded(surroundings, PATIENT_S) == plain


def test_changes_of_a_call_end_with_it() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="default")
    name.set("caller")

    def call() -> str:
        torch.set_grad_enabled(False)
        found = name.get()
        name.set("call")
        return found

    assert run_guarded(call, PATIENT_S) == "caller"
    assert torch.is_grad_enabled()
    assert run_guarded(torch.is_grad_enabled, PATIENT_S)
    assert name.get() == "caller"


def test_gradients_pass_through() -> None:
    x = torch.ones(3, requires_grad=True)
    y = run_guarded(lambda: (2 * x).sum(), PATIENT_S)
    run_guarded(y.backward, PATIENT_S)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
