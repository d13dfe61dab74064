"""`conformance`: every check that a trial makes of a backend, and more, on many small problems."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import (
    Backend,
    Refusal,
    adapted,
    forced_orders,
    missing_members,
    refuse_data,
    refuse_score_terms,
    runner,
)
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.torch_settings import settings
from attn_dispatch.testing import optional
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import problems as problems_of_all_kinds
from attn_dispatch.testing.drawn import random_problems
from attn_dispatch.text import gib, one_line, titled
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.example import double, make
from attn_dispatch.tuning.gate import HardCase, case_of
from attn_dispatch.tuning.hard_cases import CaseSpec, class_key
from attn_dispatch.tuning.oracle import Oracle, expected_of, further_checks

RANDOM = 40  #: random problems beside the fixed ones
DEVIATIONS = 6.0  #: standard deviations that a share with dropout may lie from its expectation; 1 in 5e8 by chance
P_ROUNDED = 2.0**-15  #: relative, of what kept weights are multiplied by


@dataclass(frozen=True)
class Conformance:
    """The problems that a backend computed correctly, and those that it refused, with its reasons."""

    computed: tuple[Problem, ...]
    refused: dict[Problem, tuple[Refusal, ...]]


def conformance(backend: Any, problems: Iterable[Problem] | None = None) -> Conformance:
    """Hold a backend to what attn_dispatch relies on; on small problems, in a minute at most for fast ones.

    Of each problem that `refusals` accepts, in every order that the backend offers:

    * out, lse, dq, dk, dv and dbias are within the derived tolerance of float64, have the right shapes and dtypes,
      and depend on no memory that was not written;
    * so are those of the hard cases of the problem's class: large scores, rows without keys, views with NaN around
      them, NaN in what no query sees;
    * inputs, and the memory beside them, are not written to or returned, and a second call leaves the first one's
      result alone;
    * two calls at once are right, and so is one in inference mode or with a gradient of k alone;
    * no more is allocated than `workspace_bytes` declares;
    * deterministic problems give the same bits twice;
    * dropout drops as many weights as asked, in calls that begin with one state of PyTorch's generators the same, and
      out and gradients are those of the weights that are kept;
    * `partial`, where the backend has it, is right for queries that see other keys too, `run_documents` for rows
      of documents of several lengths, `key_lens` for rows of several; `specialized` gives `run`'s bits, for others too.

    `refusals` raises nothing, says the same twice, and gives reasons. Time is not checked.

    Args:
        backend: an object or module as for `attn_dispatch.register`, or the name of one that is registered.
        problems: to hold it to; by default those of `attn_dispatch.testing.problems()` and a few random ones on a
            CPU, of which it must accept at least one.

    Returns:
        What it computed and refused.

    Raises:
        AssertionError: it does something wrong; the message lists each failing problem with all that is wrong. The
            first exception of the backend is the cause.
        InvalidInput: a problem is none, or no backend has this name.
    """
    tested = registry.load(backend) if isinstance(backend, str) else backend
    chosen = [*problems_of_all_kinds(), *random_problems(0, RANDOM)] if problems is None else list(problems)
    for problem in chosen:
        if not isinstance(problem, Problem):
            raise InvalidInput(f"problems must be Problems, got {problem!r}")
    found = _Findings(tested)
    found.check_members()
    if not found.failures:
        for problem in dict.fromkeys(chosen):
            found.check_problem(problem)
    if not found.failures and problems is None and not found.computed:
        reasons = dict.fromkeys(str(each) for refused in found.refused.values() for each in refused)
        found.failures["every problem"] = ["refused: a backend that accepts none is never chosen", *reasons]
    if found.failures:
        each = ((f"  {where}", *(f"    {text}" for text in texts)) for where, texts in found.failures.items())
        lines = (line for some in each for line in some)
        message = f"{found.name} fails {len(found.failures)} of {len(chosen)} problems:"
        raise AssertionError("\n".join([message, *lines])) from found.cause
    return Conformance(tuple(found.computed), found.refused)


class _Findings:
    """What was found of a backend so far; `failures` by problem."""

    def __init__(self, given: object) -> None:
        self.given, self.backend, self.name = given, adapted(given), str(getattr(given, "name", given))
        self.failures: dict[str, list[str]] = {}
        self.computed: list[Problem] = []
        self.refused: dict[Problem, tuple[Refusal, ...]] = {}
        self.cause: BaseException | None = None
        self.checked: set[tuple[CaseSpec, str]] = set()
        self.asked: set[tuple[str, Problem]] = set()  # of optional members

    def check_members(self) -> None:
        if missing := missing_members(self.given):
            self.failures["the backend"] = [missing]
            return
        if not isinstance(self.backend.name, str) or not self.backend.name.isidentifier():
            self.failures["the backend"] = [f"name must be an identifier, got {self.backend.name!r}"]
        with self.noting("version()"):
            version = self.backend.version()
            if not isinstance(version, str) or not version:
                self.fail("version()", f"must be a text that is not empty, got {version!r}")

    def check_problem(self, problem: Problem) -> None:
        where = str(problem)
        with self.noting(where), settings(problem.deterministic):
            data = refuse_data(self.backend, problem)
            refusals = data or [*refuse_score_terms(self.backend, problem), *self._refusals(problem)]
            if refusals:
                self.refused[problem] = tuple(refusals)
                return
            if problem.ranks > 1:
                why = f"run() has the tensors of one rank of {problem.ranks}: see refuse_ranks"
                self.fail(where, f"accepted, but {why}")
                return
            declared = self.backend.workspace_bytes(problem)
            if type(declared) is not int or declared < 0:
                raise TypeError(f"workspace_bytes must be an integer >= 0, got {declared!r}")
            for order in forced_orders(self.backend, problem):
                check = _OrderCheck(self.backend, order, problem, self.checked)
                prefix = "" if order == "natural" else f"{titled(self.name, order)}: "
                for step in (check.results, partial(check.memory, declared), check.further_calls, check.dropout):
                    self._check(where, prefix, step)
                for spec in class_key(problem):
                    self._check(where, f"{prefix}hard case: ", partial(check.hard_case, spec))
            for member in optional.CHECKS:
                self._check(where, f"{member}: ", partial(self._optional, member, problem))
            if where not in self.failures:
                self.computed.append(problem)

    def _check(self, where: str, prefix: str, step: Callable[[], Iterable[str]]) -> None:
        with self.noting(where, prefix):
            for failure in step():
                self.fail(where, prefix + failure)

    def _optional(self, member: str, problem: Problem) -> list[str]:
        problem_of, failures_of = optional.CHECKS[member]
        asked = problem_of(self.backend, problem)
        if asked is None or (member, asked) in self.asked:
            return []
        self.asked.add((member, asked))
        return failures_of(self.backend, asked)

    def _refusals(self, problem: Problem) -> list[Refusal]:
        found, again = self.backend.refusals(problem), self.backend.refusals(problem)
        for each in found:
            if not isinstance(each, Refusal) or not each.code or not each.text.strip():
                raise TypeError(f"refusals must be Refusals with a code and a text, got {each!r}")
        if list(found) != list(again):
            raise ValueError(f"refusals changed from {found} to {again}")
        return list(found)

    @contextmanager
    def noting(self, where: str, prefix: str = "") -> Iterator[None]:
        """Note an exception of the backend as a failure."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            self.cause = self.cause or error
            self.fail(where, prefix + one_line(error))

    def fail(self, where: str, text: str) -> None:
        self.failures.setdefault(where, []).append(text)


class _OrderCheck:
    """The checks of a backend in one order on one problem; each gives texts of what is wrong.

    `checked`: hard cases that were run before, for problems of the same class.
    """

    def __init__(self, backend: Backend, order: str, problem: Problem, checked: set[tuple[CaseSpec, str]]) -> None:
        self.backend, self.order, self.problem, self.checked = backend, order, problem, checked
        self.oracle = Oracle.of(make(problem))
        self.found: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        return self.oracle.run(self.backend, self.order)

    def results(self) -> list[str]:
        """Failures of the problem itself, in memory full of NaN, as a hard case is run."""
        self.found = HardCase.of("a call", self.oracle).run(self.backend, self.order)
        return list(self.oracle.check(self.found).failures)

    def memory(self, declared: int) -> list[str]:
        """Failures of a second call: tables made once do not count, results do, as `workspace_bytes` has it."""
        if not self.found:
            return []
        if self.problem.device.type == "cpu":
            again, peak = allocated_peak(self.run)
        else:
            again, measured = peak_bytes(self.run, self.problem.device)
            peak = max(0, (measured or 0) - guard.CUDA_SLACK)
        results = self.problem.result_bytes + sum(x.nbytes for name, x in again.items() if name in ("lse", "dbias"))
        failures = []
        if peak > declared + results:
            failures.append(f"allocated {gib(peak - results)} besides its results, workspace_bytes is {gib(declared)}")
        if self.problem.deterministic and any(not torch.equal(x, again[name]) for name, x in self.found.items()):
            failures.append("a second call gave other bits, though the problem is deterministic")
        return failures

    def further_calls(self) -> list[str]:
        if not self.found:
            return []
        called = self.oracle, self.backend, self.order, partial(guard.run_at_once, timeout_s=threading.TIMEOUT_MAX)
        return next((failures for check in further_checks(self.backend) if (failures := check(*called))), [])

    def hard_case(self, spec: CaseSpec) -> tuple[str, ...]:
        case = case_of(spec)
        known = (spec, self.order) in self.checked
        self.checked.add((spec, self.order))
        if known or case.refused_by(self.backend, self.order):
            return ()
        return case.check(case.run(self.backend, self.order)).failures

    def dropout(self) -> list[str]:
        """Failures of which weights are dropped, and of a call, given those that it keeps."""
        problem, p, example = self.problem, self.problem.dropout_p, make(self.problem)
        if not p:
            return []
        seen, kept = (self.weights(replace(problem, dropout_p=each)) != 0 for each in (0.0, p))
        failures = _share_failures(kept, seen, p)
        keep = kept / (1 - p)
        # A kernel's numbers may have 16 bits, which rounds the share that it drops.
        lse = self.oracle.grad_lse
        expected, other = (expected_of(example, lse, keep * (1 + off)) for off in (0.0, P_ROUNDED))
        for name, each in expected.items():
            off = torch.where(each.value == other[name].value, 0.0, each.value - other[name].value).abs().max()
            expected[name] = replace(each, tolerance=each.tolerance + float(off))
        oracle = replace(self.oracle, example=example, expected=expected)
        with self.seeded():
            found = oracle.run(self.backend, self.order)
        return failures + [f"with the weights that it keeps, {each}" for each in oracle.check(found).failures]

    def weights(self, problem: Problem) -> Tensor:
        """[batch, heads, q_len, k_len]: by calls with values of 0 and 1 that begin with one state of the generators, as
        where a checkpoint computes a call again.
        """
        example, found = make(self.problem), []
        run = runner(self.backend, self.order, problem, None)
        for first in range(0, problem.k_len, problem.head_dim):
            at = torch.arange(first, min(first + problem.head_dim, problem.k_len))
            v = torch.zeros_like(example.v)
            v[:, at, :, at - first] = 1
            with self.seeded(), torch.set_grad_enabled(problem.needs_grad):
                result = run(example.q, example.k, v.requires_grad_(problem.needs_grad), problem, **example.masks)
            out = result if isinstance(result, Tensor) else result[0]
            found.append(double(out)[..., : len(at)].transpose(1, 2))
        return torch.cat(found, -1)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Inside, the generators draw the same numbers."""
        with torch.random.fork_rng([self.problem.device] if self.problem.device.type == "cuda" else []):
            torch.manual_seed(0)
            yield


def _share_failures(kept: Tensor, seen: Tensor, p: float) -> list[str]:
    """What is wrong with which weights [batch, heads, q_len, k_len] are kept: how many, and neighbours alike."""
    if bool(kept[~seen.any(-1)].any()):
        return ["with dropout, a query without keys has a result"]
    share = float(kept[seen].double().mean()) if seen.any() else 1 - p
    off = torch.where(seen, kept.double() - (1 - p), 0.0) / math.sqrt(p * (1 - p))
    failures = []
    if abs(float(off.sum())) > DEVIATIONS * math.sqrt(float(seen.sum())):
        failures.append(f"keeps {share:.1%} of the weights, not {1 - p:.1%}")
    for axis, name in ((2, "queries"), (3, "keys")):
        size = off.shape[axis] - 1
        pairs, both = (x.narrow(axis, 0, size) * x.narrow(axis, 1, size) for x in (off, seen))
        if abs(float(pairs.sum())) > DEVIATIONS * math.sqrt(float(both.sum())):
            failures.append(f"drops weights of neighbouring {name} alike")
    return failures
