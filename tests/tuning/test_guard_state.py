"""A guarded call runs in the caller's state and does not change it."""

from __future__ import annotations

import contextvars

import torch

from attn_dispatch.tuning.guard import run_guarded
from tests.support.calls import threads
from tests.support.guarded import PATIENT_S


def test_a_call_runs_with_the_callers_number_of_threads() -> None:
    """In a thread that has run kernels before, which does not follow the others' number of threads any more."""
    before = run_guarded(torch.get_num_threads, PATIENT_S)
    assert before == torch.get_num_threads()
    with threads(before + 1):
        assert run_guarded(torch.get_num_threads, PATIENT_S) == before + 1
        assert run_guarded(lambda: run_guarded(torch.get_num_threads, PATIENT_S), PATIENT_S) == before + 1
    assert run_guarded(torch.get_num_threads, PATIENT_S) == before


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
