"""Batch invariance: what asks for it, who is admitted, and that a row has the same bits in all that it is part of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, InvalidInput, NoBackend, Ranges, Window, attend, batch_invariant, explain
from attn_dispatch.backends import native
from attn_dispatch.decisions import decide, invariant
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.tuning import invariance
from attn_dispatch.tuning.gate import case_of
from attn_dispatch.tuning.hard_cases import class_key
from attn_dispatch.tuning.invariance import difference, family_of
from tests.support.cases import failures
from tests.support.pairwise import by_turns, thinned
from tests.support.processes import printed
from tools.checks.invariance import count

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def qkv(dtype: torch.dtype = torch.float32, head_dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 40, 2, head_dim).to(dtype) for _ in range(3))
    return q, k, v


def family(dtype: torch.dtype = torch.float32, head_dim: int = 32, **changes: Any) -> Problem:
    found = family_of(
        replace(
            Problem.of(*qkv(dtype, head_dim=head_dim), Dense(is_causal=True)), **{"batch_invariant": True, **changes}
        )
    )
    assert found is not None
    return found


@pytest.mark.parametrize("head_dim", [64, 80, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_gives_a_row_the_same_bits(dtype: torch.dtype, head_dim: int) -> None:
    assert difference(registry.load("native"), family(dtype, head_dim)) == ""


KINDS = ({"heads": 4}, {"softcap": 3.0}, {"alibi_axes": 1}, {"bias": (1, 2)}, {"needs_grad": True})


@by_turns(("changes", "dtype"), KINDS, DTYPES, str)
def test_of_all_kinds(changes: dict[str, Any], dtype: torch.dtype) -> None:
    assert difference(registry.load("native"), family(dtype, 64, **changes)) == ""


@pytest.mark.usefixtures("no_trials")  # nor hard cases, which ask for no equal bits
def test_of_random_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "difference", lambda *_: "")  # this finds what that might miss
    pairs = 20_000 if request.config.option.rest or request.config.option.all else 90
    found, wrong = count(pairs, "native")
    assert not wrong
    assert min(found.values()) > 0
    assert len(found) == 9


# --- the gate -------------------------------------------------------------------------------------------------


class Dependent:
    """The native kernel, of which one number changes by its last bit where `when` says so of a problem."""

    name = "dependent"
    version, refusals = staticmethod(native.version), staticmethod(native.refusals)
    workspace_bytes = staticmethod(native.workspace_bytes)

    def __init__(self, when: Callable[[Problem], bool]) -> None:
        self.when = when

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        found = native.run(q, k, v, problem, **tensors)
        return self.changed(found, 0) if self.when(problem) else found

    def changed(self, found: Any, token: int) -> Any:
        out = found[0].clone()
        out[:, token, 0, 0] = torch.nextafter(out[:, token, 0, 0], torch.tensor(9.0))
        return out, found[1]


class InDocuments(Dependent):
    def run_documents(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: Any, **tensors: Any) -> Any:
        return self.changed(native.run_documents(q, k, v, problem, lengths, **tensors), sum(lengths[:2]) - 1)


CAUGHT = {
    "in a batch": lambda p: p.batch == 3,
    "in 3 threads": lambda p: torch.get_num_threads() == 3,
    "padded, with seq_lens": lambda p: p.has_seq_lens,
    "padded, with key_mask": lambda p: p.has_key_mask,
    "in parts": lambda p: 1 < p.q_len < p.k_len < 400,
    "decoded": lambda p: p.q_len == 1,
    "decoded in 2 threads": lambda p: p.q_len == 1 and p.k_len > 1500 and torch.get_num_threads() == 2,
}


@pytest.mark.parametrize(("what", "when"), CAUGHT.items(), ids=CAUGHT)
def test_bits_that_depend_on_others_are_found(what: str, when: Callable[[Problem], bool]) -> None:
    assert difference(adapted(Dependent(when)), family()) == f"gives a row of Dense(causal) other bits {what}"


def test_bits_that_depend_on_being_packed_are_found() -> None:
    assert difference(adapted(InDocuments(lambda _: False)), family()).endswith("other bits packed")


def test_a_variant_that_is_refused_is_named() -> None:
    found = difference(registry.load("sdpa_float32"), family(torch.bfloat16))
    assert "takes no variant of" in found or "other bits" in found


def test_a_backend_is_admitted_by_the_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    registry.register(Dependent(lambda p: p.batch == 3))
    with batch_invariant():
        with pytest.raises(NoBackend, match=r"batch_invariant: gives a row of Dense.* other bits in a batch"):
            attend(q, k, v, backend="dependent")
        assert explain(q, k, v).choice == "native"
        attend(q, k, v)
        monkeypatch.setattr(decide, "why_variant", lambda *_: "has never passed")  # nor is it asked again
        assert attend(q, k, v[:, :, :, :32], Window(3, 0)).shape == q.shape
        with pytest.raises(NoBackend, match="manual: batch_invariant: has never passed"):
            attend(q, k, v, backend="manual")


def test_what_was_found_is_kept_for_later_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()

    def difference(*_: object) -> str:
        return "it was checked again"

    with batch_invariant():
        attend(q, k, v)
        invariant._decided.clear()
        monkeypatch.setattr(invariance, "difference", difference)
        attend(q, k, v[..., :32], is_causal=True)


# --- the setting ----------------------------------------------------------------------------------------------


def test_it_changes_the_choice_of_a_known_call_and_no_key() -> None:
    q, k, v = qkv()
    plain = Problem.of(q, k, v)
    attend(q, k, v, backend="manual")
    with batch_invariant():
        asked = Problem.of(q, k, v)
        with pytest.raises(NoBackend, match="backend='manual' cannot run"):
            attend(q, k, v, backend="manual")
        with batch_invariant(False):
            attend(q, k, v, backend="manual")
    assert asked == replace(plain, batch_invariant=True)
    assert "batch_invariant" not in plain.to_dict()
    assert Problem.from_dict(asked.to_dict()) == asked
    assert "batch-invariant" in str(asked)
    assert "batch-invariant" not in str(plain)


def test_it_holds_for_its_thread() -> None:
    found = []
    with batch_invariant():
        thread = threading.Thread(target=lambda: found.append(Problem.of(*qkv()).batch_invariant))
        thread.start()
        thread.join()
    assert found == [False]
    with pytest.raises(InvalidInput, match="enabled must be"), batch_invariant(1):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(("value", "asked"), [("", "False"), ("0", "False"), ("1", "True")])
def test_the_variable(value: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BATCH_INVARIANT", value)
    assert printed("-c", "from attn_dispatch import settings; print(settings.asks_invariance())").strip() == asked


def test_what_is_not_checked_is_refused_by_name() -> None:
    q, k, v = qkv()
    with batch_invariant():
        with pytest.raises(NoBackend, match="native: batch_invariant: is not checked for dropout"):
            attend(q, k, v, dropout_p=0.5)
        with pytest.raises(NoBackend, match="native: batch_invariant: is not checked for Ranges"):
            attend(q, k, v, Ranges(torch.arange(40)[None] // 7 * 2, torch.arange(40)[None]))
        with pytest.raises(NoBackend, match="is not checked in hilbert order"):
            attend(q, k, v, order="hilbert")
        with pytest.raises(NoBackend, match="batch_invariant: over a mesh"):
            attend(q, k, v, mesh=object())


@thinned("case", CASES, 15, lambda case: case.id)
def test_results_are_right(case: Case) -> None:
    for dtype in DTYPES:
        problem, backend = case.problem(dtype, needs_grad=True), registry.load("native")
        problem = replace(problem, batch_invariant=True)
        if not backend.refusals(problem):
            assert failures(backend, problem) == ()
            for hard in map(case_of, class_key(problem)):
                assert hard.refused_by(backend) or hard.check(hard.run(backend)).failures == ()
