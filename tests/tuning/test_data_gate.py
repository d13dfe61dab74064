"""What public kernels of block tables got wrong, as stand-ins: the gate keeps each out, and names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, register
from attn_dispatch.backends import manual
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Result
from attn_dispatch.spec.data import Blocks, BlocksForm, RangesForm
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import Gate, HardCase, case_of
from attn_dispatch.tuning.hard_cases import class_key
from attn_dispatch.tuning.rounds import exhausted
from tests.support.flaws import Planted, scored
from tests.support.pairwise import thinned

pytestmark = pytest.mark.usefixtures("little_time")


class Table(Planted):
    """A stand-in that takes masks made of data."""

    takes_data = True


def problem_of(form: Pattern, *, needs_grad: bool = True, **more: Any) -> Problem:
    """Grouped heads of head_dim 64."""
    problem = Case("", form, (2, 512, 8, 64), kv_heads=2).problem(torch.float32, needs_grad=needs_grad)
    return replace(problem, **more)


def cases_of(problem: Problem) -> list[HardCase]:
    return [case_of(spec) for spec in class_key(problem)]


def with_data(change: Callable[[Tensor, BlocksForm], Tensor]) -> Callable[..., Result]:
    """The right results of other tensors."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, pattern_data: Tensor, **tensors: Tensor) -> Result:
        form: Any = problem.pattern
        return manual.run(q, k, v, problem, pattern_data=change(pattern_data, form), **tensors)

    return run


def all_blocks(data: Tensor, form: BlocksForm) -> Tensor:
    return torch.arange(data.shape[-1]).expand_as(data).int() if form.is_list else torch.ones_like(data)


def once(data: Tensor, form: BlocksForm) -> Tensor:
    """Each entry as often as it stands first."""
    ordered = data.sort(-1).values
    again = torch.cat([torch.zeros_like(ordered[..., :1]), (ordered[..., 1:] == ordered[..., :-1]).int()], -1)
    return ordered.masked_fill(again > 0, -1)


def of_head_0(data: Tensor, form: BlocksForm) -> Tensor:
    return data[:, :1].expand_as(data)


def of_row_0(data: Tensor, form: BlocksForm) -> Tensor:
    return data[:1].expand_as(data)


def wrong_group(data: Tensor, form: BlocksForm) -> Tensor:
    """Neighbouring query heads take each other's tables."""
    return data.roll(1, 1)


def until_minus_one(data: Tensor, form: BlocksForm) -> Tensor:
    """Lists end at the first entry of -1."""
    return data.masked_fill((data == -1).cummax(-1).values, -1)


def in_order(data: Tensor, form: BlocksForm) -> Tensor:
    """From the first to the last block of a list, as of one run."""
    low = data.masked_fill(data < 0, 2**30).amin(-1, keepdim=True)
    at = torch.arange(int(data.max()) + 1, dtype=data.dtype)
    return torch.where((at >= low) & (at <= data.amax(-1, keepdim=True)), at, -1)


class Doubled(torch.autograd.Function):
    """As FlashAttention-4 was at head_dim 64: other gradients than results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * 1.19


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    q = Doubled.apply(q) if problem.head_dim == 64 and problem.needs_grad else q  # type: ignore[no-untyped-call]
    return manual.run(q, k, v, problem, **tensors)


def whole_blocks(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """Reads the values of the last block to its end; their weights are 0, but what they hold is not."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    form: Any = problem.pattern
    length = -(-problem.k_len // form.size[1]) * form.size[1]
    beyond = v.as_strided((v.shape[0], length, *v.shape[2:]), v.stride())[:, problem.k_len :]
    return out + (0 * beyond).sum().to(out.dtype), lse


def nan_rows(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    out, lse = manual.run(q, k, v, problem, **tensors)
    return torch.where((lse == -math.inf).mT[..., None], math.nan, out), lse


def all_keys_read(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """With weights of 0 where the table says so: 0 * NaN is NaN."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    return out + (0 * v.sum(1, keepdim=True)).repeat_interleave(problem.heads // problem.kv_heads, 2), lse


LISTS = BlocksForm((64, 64), "kv_heads", by_row=True, is_list=True, within=Dense(), density=-6)
TABLE = replace(LISTS, is_list=False)
SIZES = ((64, 64), (16, 16), (128, 64), (128, 128), (256, 256), (17, 100), (512, 1024))
FLAWS: dict[str, tuple[tuple[BlocksForm, ...], Callable[..., Result], str]] = {
    "gradients": ((LISTS, TABLE), wrong_gradient, "dq is off by"),
    "table ignored": ((LISTS, TABLE), with_data(all_blocks), "out is off by"),
    "entries counted once": ((LISTS,), with_data(once), "lse is off by"),
    "table of head 0": ((LISTS, TABLE, replace(TABLE, heads="heads")), with_data(of_head_0), "out is off by"),
    "table of another head": ((LISTS, replace(TABLE, heads="heads")), with_data(wrong_group), "out is off by"),
    "table of row 0": ((LISTS, TABLE), with_data(of_row_0), "out is off by"),
    "list ends at -1": ((LISTS,), with_data(until_minus_one), "is off by"),
    "list as a run": ((LISTS,), with_data(in_order), "is off by"),
    "last block read on": ((LISTS, TABLE), whole_blocks, "out has NaN"),
    "NaN without keys": ((LISTS, TABLE), nan_rows, "out has NaN"),
    "hidden keys read": ((LISTS, TABLE), all_keys_read, "NaN that is hidden, rows without keys: out has NaN"),
}


def planted(flaw: str) -> Iterator[Any]:
    """The flaw in each class of problems that it is found in; every run takes the first one."""
    for number, (form, size) in enumerate(product(FLAWS[flaw][0], SIZES)):
        alike = not ({"head", "row"} & set(flaw.split()))  # tables that are shared show it too
        for each in [form, replace(form, heads="all", by_row=False)][: 1 + alike]:
            marks = pytest.mark.full if number or each is not form else ()
            yield pytest.param(flaw, replace(each, size=size), marks=marks, id=f"{flaw}-{each}-{size}")


@pytest.mark.parametrize(("flaw", "form"), [each for flaw in FLAWS for each in planted(flaw)])
def test_the_gate_refuses_by_name(flaw: str, form: BlocksForm) -> None:
    _, run, named = FLAWS[flaw]
    problem = problem_of(form)
    gate = Gate(problem, Request.of(problem).address)
    found = exhausted(gate.check_hard_cases(Candidate(Table(run), NATURAL, "1")))
    assert found is not None
    assert (found.status, named in found.reason) == ("incorrect", True), found.reason
