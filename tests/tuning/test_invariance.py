"""Batch invariance: what asks for it, who is admitted, and that a row has the same bits in all that it may be part of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_dispatch
from attn_dispatch import Dense, InvalidInput, NoBackend, Ranges, Window, attend, batch_invariant, explain
from attn_dispatch.backends import native
from attn_dispatch.decisions import invariant
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.native import library
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning import gate, invariance
from attn_dispatch.tuning.invariance import difference, family_of
from tests.support.processes import printed
from tools.checks.invariance import count

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def qkv(dtype: torch.dtype = torch.float32, tokens: int = 40, head_dim: int = 32) -> list[Tensor]:
    return [torch.randn(2, tokens, 2, head_dim).to(dtype) for _ in range(3)]


def family(dtype: torch.dtype = torch.float32, head_dim: int = 32, **changes: Any) -> Problem:
    found = family_of(replace(Problem.of(*qkv(dtype, head_dim=head_dim), Dense(is_causal=True)), **{"batch_invariant": True, **changes}))
    assert found is not None
    return found


@pytest.mark.parametrize("head_dim", [64, 80, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_gives_a_row_the_same_bits(dtype: torch.dtype, head_dim: int) -> None:
    assert difference(registry.load("native"), family(dtype, head_dim)) == ""


@pytest.mark.parametrize("changes", [{"heads": 4}, {"softcap": 3.0}, {"alibi_axes": 1}, {"bias": (1, 2)}, {"needs_grad": True}], ids=str)
def test_of_all_kinds(changes: dict[str, Any]) -> None:
    for dtype in DTYPES:
        assert difference(registry.load("native"), family(dtype, 64, **changes)) == ""


def test_of_random_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "difference", lambda *_: "")  # this finds what that might miss
    pairs = 20_000 if request.config.option.rest or request.config.option.all else 300
    found, wrong = count(pairs, "native")
    assert not wrong
    assert min(found.values()) > 0 and len(found) > 8


# --- the gate -------------------------------------------------------------------------------------------------


class Dependent:
    """The native kernel, whose results change by a bit where `when` says so of a problem."""

    name, version, refusals, workspace_bytes = "dependent", native.version, native.refusals, native.workspace_bytes
    score_terms = native.score_terms

    def __init__(self, when: Callable[[Problem], bool]) -> None:
        self.when = when

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        return self.changed(native.run(q, k, v, problem, **tensors), self.when(problem))

    def changed(self, found: Any, changes: bool) -> Any:
        if not changes:
            return found
        out = found[0].clone()
        out[:, -1, 0, 0] = torch.nextafter(out[:, -1, 0, 0], torch.tensor(9.0))
        return out, found[1]


class InDocuments(Dependent):
    def run_documents(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: Any, **tensors: Any) -> Any:
        out, lse = native.run_documents(q, k, v, problem, lengths, **tensors)
        of_two = sum(lengths[:-1])
        changed, _ = self.changed((out[:, :of_two], lse), True)
        return torch.cat([changed, out[:, of_two:]], 1), lse


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
        with pytest.raises(NoBackend, match="batch_invariant: gives a row of Dense.* other bits in a batch"):
            attend(q, k, v, backend="dependent")
        assert explain(q, k, v).choice == "native"
        attend(q, k, v)
        monkeypatch.setattr(gate.Gate, "why_variant", lambda *_: "has never passed")  # nor is it asked again
        assert attend(q, k, v[:, :, :, :32], Window(3, 0)).shape == q.shape
        with pytest.raises(NoBackend, match="manual: batch_invariant: has never passed"):
            attend(q, k, v, backend="manual")


def test_what_was_found_is_kept_for_later_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    with batch_invariant():
        attend(q, k, v)
        invariant._decided.clear()
        monkeypatch.setattr(invariance, "difference", lambda *_: pytest.fail("it was checked before"))
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
    assert asked == replace(plain, batch_invariant=True) and "batch_invariant" not in plain.to_dict()
    assert Problem.from_dict(asked.to_dict()) == asked
    assert "batch-invariant" in str(asked) and "batch-invariant" not in str(plain)


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
    assert printed("from attn_dispatch.spec.invariance import asked; print(asked())") == asked


def test_what_is_not_checked_is_refused_by_name() -> None:
    q, k, v = qkv()
    with batch_invariant():
        with pytest.raises(NoBackend, match="native: batch_invariant: is not checked for dropout"):
            attend(q, k, v, dropout_p=0.5)
        with pytest.raises(NoBackend, match="native: batch_invariant: is not checked for Ranges"):
            attend(q, k, v, Ranges(torch.zeros(40, dtype=torch.int64), torch.arange(40)))
        with pytest.raises(NoBackend, match="is not checked in hilbert order"):
            attend(q, k, v, order="hilbert")
        with pytest.raises(NoBackend, match="batch_invariant: over a mesh"):
            attend(q, k, v, mesh=object())
    assert attn_dispatch.batch_invariant is batch_invariant and library.load()
