"""What public kernels of block tables got wrong, as stand-ins: the gate keeps each out, by name, and lets others in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Result
from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing import conformance
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.gate import Gate, case_of
from attn_dispatch.tuning.hard_cases import class_key
from attn_dispatch.tuning.rounds import exhausted
from tests.support.flaws import Planted
from tests.support.pairwise import thinned

pytestmark = pytest.mark.usefixtures("little_time")
LISTS = BlocksForm((64, 64), "kv_heads", by_row=True, is_list=True, within=Dense(), density=-6)
TABLE, RANGES = replace(LISTS, is_list=False), RangesForm(2, by_row=True)
EACH, BY_HEAD = (LISTS, TABLE, RANGES), replace(TABLE, heads="heads")
SIZES = ((64, 64), (16, 16), (128, 64), (128, 128), (256, 256), (17, 100), (512, 1024))


def asked(form: Pattern) -> Problem:
    """Grouped heads of head_dim 64."""
    return Case("", form, (2, 512, 8, 64), kv_heads=2).problem(torch.float32, needs_grad=True)


def of_other_data(change: Callable[[Tensor], Tensor]) -> Callable[..., Result]:
    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, pattern_data: Tensor, **tensors: Tensor) -> Result:
        return manual.run(q, k, v, problem, pattern_data=change(pattern_data), **tensors)

    return run


def all_blocks(x: Tensor) -> Tensor:
    return torch.ones_like(x) if x.dtype == torch.bool else torch.arange(x.shape[-1]).expand_as(x).int()


def once(x: Tensor) -> Tensor:
    """Each entry as often as it stands first."""
    ordered = x.sort(-1).values
    return torch.cat([ordered[..., :1], ordered[..., 1:].masked_fill(ordered.diff() == 0, -1)], -1)


def as_a_run(x: Tensor) -> Tensor:
    """From the first to the last block of a list."""
    low, at = x.masked_fill(x < 0, 2**30).amin(-1, keepdim=True), torch.arange(int(x.max()) + 1, dtype=x.dtype)
    return torch.where((at >= low) & (at <= x.amax(-1, keepdim=True)), at, -1)


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    if q.requires_grad:
        (q := q.clone()).register_hook(lambda grad: 1.19 * grad)  # type: ignore[no-untyped-call]
    return manual.run(q, k, v, problem, **tensors)


def changed(change: Callable[[Tensor, Tensor, Tensor, Any], Tensor]) -> Callable[..., Result]:
    """Another out: of v, out, lse and the problem."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        out, lse = manual.run(q, k, v, problem, **tensors)
        return change(v, out, lse, problem), lse

    return run


def read_on(v: Tensor, out: Tensor, lse: Tensor, problem: Any) -> Tensor:
    """Reads the values of the last block to its end; their weights are 0, but what they hold is not."""
    length = -(-problem.k_len // problem.pattern.size[1]) * problem.pattern.size[1]
    beyond = v.as_strided((v.shape[0], length, *v.shape[2:]), v.stride())[:, problem.k_len :]
    return out + (0 * beyond).sum().to(out.dtype)


FLAWS: dict[str, tuple[tuple[Pattern, ...], Callable[..., Result], str]] = {
    "gradients at 64": (EACH, wrong_gradient, "dq is off by"),
    "no table": ((TABLE, LISTS), of_other_data(all_blocks), "out is off by"),
    "counted once": ((LISTS,), of_other_data(once), "lse is off by"),
    "table of head 0": ((LISTS, TABLE), of_other_data(lambda x: x[:, :1].expand_as(x)), "is off by"),
    "table of another head": ((LISTS, BY_HEAD), of_other_data(lambda x: x.roll(1, 1)), "is off by"),
    "table of row 0": ((LISTS, TABLE), of_other_data(lambda x: x[:1].expand_as(x)), "is off by"),
    "ends at -1": ((LISTS,), of_other_data(lambda x: x.masked_fill((x == -1).cummax(-1).values, -1)), "is off by"),
    "list as a run": ((LISTS,), of_other_data(as_a_run), "is off by"),
    "last block read on": ((LISTS, TABLE), changed(read_on), "out has NaN"),
    "NaN without keys": (
        EACH,
        changed(lambda v, out, lse, _: torch.where((lse == -math.inf).mT[..., None], math.nan, out)),
        "out has NaN",
    ),
    "hidden keys read": (EACH, changed(lambda v, out, *_: out + 0 * v.sum()), "is hidden, rows without keys: out has"),
    "one interval": ((RANGES,), of_other_data(lambda x: x[:, :, :1]), "is off by"),
    "last key left out": ((RANGES,), of_other_data(lambda x: x - torch.tensor([0, 1]).view(2, 1, 1, 1)), "is off by"),
}


def planted(flaw: str) -> Iterator[Any]:
    """The flaw in classes of problems, of which every run takes the first."""
    shared: dict[str, Any] = {"heads": "all", "by_row": False}  # of which nobody can take another's
    others: list[dict[str, Any]] = [{}] if {"head", "row"} & set(flaw.split()) else [{}, shared]
    forms, blocks = FLAWS[flaw][0], [form for form in FLAWS[flaw][0] if isinstance(form, BlocksForm)]
    found = [replace(form, size=size, **more) for form, size, more in product(blocks, SIZES, others)]
    for number, each in enumerate([*found, *(form for form in forms if form is RANGES)]):
        yield pytest.param(flaw, each, marks=[pytest.mark.full] * (number > 0), id=f"{flaw}: {each}")


@pytest.mark.parametrize(("flaw", "form"), [each for flaw in FLAWS for each in planted(flaw)])
def test_the_gate_refuses_by_name(flaw: str, form: Pattern) -> None:
    _, run, named = FLAWS[flaw]
    gate = Gate(asked(form), Request.of(asked(form)).address)
    (backend := Planted(run)).takes_data = True
    found = exhausted(gate.check_hard_cases(Candidate(backend, NATURAL, "1")))
    assert found is not None
    assert (found.status, named in found.reason) == ("incorrect", True), found.reason


WITHIN = (Window(400, 0), Dilated((256, 512), (1, 2)), Neighborhood((16, 32), (5, 5)))
FORMS = [RANGES, LISTS, *(replace(TABLE, size=size, within=each) for each in WITHIN for size in SIZES)]


@thinned("form", FORMS, 9, ids=str)
def test_what_is_right_passes(form: Pattern) -> None:
    for case in map(case_of, class_key(asked(form))):
        for backend in map(registry.load, ("manual", "native", "sdpa_mask")):
            assert case.refused_by(backend) or case.check(case.run(backend)).failures == (), backend.name


@pytest.mark.parametrize("within", [Dilated((65, 64), (1, 5)), Dense(is_causal=True)], ids=str)
def test_long_blocks_of_few_queries_have_cases(within: Pattern) -> None:
    """Two blocks of queries are more than the keys, and a dilated pattern takes no more queries than keys."""
    problem = Case("", BlocksForm((256, 16), "all", False, False, within), (1, 23, 2, 8), k_len=68)
    conformance("manual", [problem.problem(torch.float32, needs_grad=False)])


def test_the_last_resort_declares_what_many_queries_of_few_keys_take() -> None:
    """Copies of queries in the dtype of sums are more than the scores."""
    problem = Case("", Window(None, 15), (3, 20, 1, 11), k_len=2, key_mask=True)
    conformance("manual", [problem.problem(torch.float16, needs_grad=True)])
