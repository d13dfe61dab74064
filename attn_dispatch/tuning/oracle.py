"""The oracle: compares a candidate's out, lse and gradients with the formula in float64, within a derived tolerance.

Where the whole formula would take too long, some query rows and heads are drawn, and the gradient of out is zero
everywhere else. Then dq is zero off the drawn rows, and dk and dv, at every key, are sums over those rows alone: the
candidate still runs at full size, and the expected values are exact. Devices without float64 leave all this to a CPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attn_dispatch.kernels import formula
from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import Backend, runner, traces
from attn_dispatch.kernels.numerics import multiplicity_of, rows_of_bias, sum_dtype
from attn_dispatch.machine.openmp import openmp
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import Example, exactly, make
from attn_dispatch.tuning.guard import reference

PAIRS = 2**21  #: query-key pairs that are evaluated in float64; past this, rows are drawn
FEW_PAIRS = 2**16  #: the same where a caller waits
KEY_BYTES = 2**27  #: bytes of keys in float64, and the same again of values; past this, heads are drawn
STEP_PAIRS = 2**13  #: the same where a single call waits for a step of a trial; heads are drawn then too
ONE_THREAD = 2**19  #: entries of q or k up to which a single thread compares results
GRADIENTS = ("dq", "dk", "dv", "dbias")
MEETING_S = 1.0  #: seconds that two calls wait for one another to begin at once
FEWEST_ROWS = 4  #: query rows that are drawn, whatever PAIRS says
FEWEST_HEADS = 2  #: the same of heads


class Incorrect(RuntimeError):
    """A call changed its inputs, returned their memory, or gave another result than the first timed one."""


@contextmanager
def _threads_for(problem: Problem) -> Iterator[None]:
    """Let this thread's operators start no other threads where the tensors are small.

    Such threads would wait for each other as long as they compute, and many times longer where other programs use the
    cores too. OpenMP has this setting for each thread.
    """
    entries = problem.batch * problem.head_dim * max(problem.q_len * problem.heads, problem.k_len * problem.kv_heads)
    library = openmp()
    if library is None or entries > ONE_THREAD:
        yield
        return
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected value of a tensor in float64, and the largest absolute error of a correct result."""

    value: Tensor
    tolerance: float


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The largest absolute error of out, and a text for each way in which the result is wrong."""

    error: float
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The expected results of one example, for the drawn query `rows` and `heads`.

    `grad` and `grad_lse` are the gradients of out and lse, zero except at these; None where they are not needed.
    """

    example: Example
    rows: Tensor
    heads: Tensor
    grad: Tensor | None
    grad_lse: Tensor | None
    expected: dict[str, Expected]
    facts: list[float]  #: of the example

    @classmethod
    @reference()
    def of(cls, example: Example, pairs: int | None = None) -> Oracle:
        """Evaluate the expected results, of rows with about `pairs` (`PAIRS`) query-key pairs. Raises NoReference."""
        example, grad, grad_lse = example.without_dropout(), None, None
        exact = example.exact()
        drawn = draw(example.problem, PAIRS if pairs is None else pairs)
        rows, heads = (x.to(exact.problem.device) for x in drawn)
        with _threads_for(example.problem):
            if example.grad is not None:
                grad = torch.zeros_like(example.grad)
                grad[:, rows[:, None], heads] = example.grad[:, rows[:, None], heads]
                grad_lse = _grad_lse(example.problem, rows, heads)
            expected = _Sample.of(exact, rows, heads, None if grad_lse is None else exactly(grad_lse)).expected()
        return cls(example, rows, heads, grad, grad_lse, expected, example.facts())

    @property
    def differences(self) -> list[float]:
        """By how much right results of `Example.call` may differ, in its order. There every row has a gradient."""
        rows = self.example.problem.q_len * self.example.problem.heads / (len(self.rows) * len(self.heads))
        found = {name: self.expected[name].tolerance for name in ("out", *GRADIENTS) if name in self.expected}
        return [2 * off * (1 if name in ("out", "dq") else rows) for name, off in found.items()]

    @reference()
    def restored(self) -> bool:
        """Whether something wrote into the example; then it is drawn again. Raises NoReference."""
        changed = self.example.facts() != self.facts
        if changed:
            self.example.restore()
        return changed

    def run(self, backend: Backend, order: str = NATURAL) -> dict[str, Tensor]:
        """Run the candidate at full size; its tensors by name.

        Raises:
            TypeError: the backend returned something other than out or (out, lse).
            Incorrect: the backend wrote into its inputs, or returned their memory.
        """
        example = self.example
        inputs = (example.q, example.k, example.v, *example.masks.values())
        versions, qkv = [None if x.is_inference() else x._version for x in inputs], inputs[:3]
        with torch.set_grad_enabled(example.problem.needs_grad):
            result = runner(backend, order, example.problem, qkv)(*qkv, example.problem, **example.masks)
        out, lse = _parts(result)
        found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
        if self.grad is not None:
            results, weights = [out], [self.grad]
            if self.grad_lse is not None and lse is not None and lse.shape == self.grad_lse.shape:
                results, weights = [out, lse], [self.grad, self.grad_lse]
            found.update(zip(example.inputs, gradients(results, tuple(example.inputs.values()), weights)))
        if versions != [None if x.is_inference() else x._version for x in inputs]:
            raise Incorrect("wrote into its inputs")
        if out.untyped_storage().data_ptr() in [x.untyped_storage().data_ptr() for x in inputs]:
            raise Incorrect("returned the memory of an input")
        return found

    @reference()
    def check(self, found: dict[str, Tensor]) -> CheckResult:
        """Compare the tensors that `run` returned with the expected ones. Raises NoReference."""
        found = {name: exactly(x) for name, x in found.items()}
        with _threads_for(self.example.problem):
            failures, errors = _contract_failures(found, self.example.problem), {"out": math.inf}
            for name, expected in [] if failures else self.expected.items():
                if name in found:
                    errors[name] = error = _error(self._drawn(name, found[name]), expected.value)
                    if not error <= expected.tolerance:
                        failures.append(f"{name} is off by {error:.2e}, more than {expected.tolerance:.2e}")
            if "dq" in errors and not self._zero_elsewhere(found["dq"]):
                failures.append("dq is not zero where the gradient of out is")
            return CheckResult(errors["out"], tuple(failures))

    def second_call_failures(self, backend: Backend, order: str, run_at_once: RunAtOnce) -> list[str]:
        """Call again on the same tensors with other values; failures where the first result changed or was returned."""
        run = partial(self.run, backend, order)
        known = (first := run_at_once([run])[0]["out"]).clone()
        opposite = self.negate()
        (second,) = run_at_once([run])
        self.negate()
        if not torch.equal(first, known):
            return ["a second call changed the result of the first"]
        return [f"a second call on the same tensors: {each}" for each in opposite.check(second).failures]

    def at_once_failures(self, backend: Backend, order: str, run_at_once: RunAtOnce) -> list[str]:
        """Failures of two calls at once, with other values."""
        oracles, meeting = (self, self.again().negate()), threading.Barrier(2)

        def call(oracle: Oracle) -> dict[str, Tensor]:
            oracle.example.facts()  # what a thread does once comes before the calls meet
            with suppress(threading.BrokenBarrierError):
                meeting.wait(MEETING_S)
            return oracle.run(backend, order)

        results = run_at_once([partial(call, each) for each in oracles])
        failures = (each.check(found).failures for each, found in zip(oracles, results))
        return [f"two calls at once: {failure}" for each in failures for failure in each]

    def call_here_failures(self, backend: Backend, order: str, _: RunAtOnce) -> list[str]:
        """Failures of a call in this thread, in inference mode or with a gradient of k alone."""
        with torch.inference_mode(self.grad is None):
            oracle = self.again()
            oracle.example.q.requires_grad_(False)
            oracle.example.v.requires_grad_(False)
            found = oracle.run(backend, order)
        how = "in inference mode" if self.grad is None else "with a gradient of k alone"
        return [f"in the caller's thread, {how}: {failure}" for failure in oracle.check(found).failures]

    def negate(self) -> Oracle:
        """Negate v and the gradient of out where they lie; the oracle of what they are now: only out and dv change."""
        with torch.no_grad():  # an expanded tensor cannot be written to, but its memory, once
            for x in (self.example.v, *([] if self.grad is None else [self.grad])):
                x.as_strided([1 if step == 0 else size for size, step in zip(x.shape, x.stride())], x.stride()).neg_()
        opposite = {name: replace(x, value=-x.value) for name, x in self.expected.items() if name in ("out", "dv")}
        return replace(self, expected={**self.expected, **opposite})

    @reference()
    def again(self) -> Oracle:
        """The same with tensors of its own, of an example that was made on a CPU. Raises NoReference."""
        grad = None if self.grad is None else self.grad.clone()
        return replace(self, example=make(self.example.problem, self.example.seed), grad=grad)

    def _drawn(self, name: str, tensor: Tensor) -> Tensor:
        if name == "lse":
            return tensor[:, self.heads[:, None], self.rows]
        if name in ("out", "dq"):
            return tensor[:, self.rows[:, None], self.heads]
        if name == "dbias":
            return rows_of_bias(tensor, self.heads.tolist(), self.rows)
        group = self.example.problem.heads // self.example.problem.kv_heads
        return tensor[:, :, torch.unique(self.heads // group)]

    def _zero_elsewhere(self, dq: Tensor) -> bool:
        drawn = torch.zeros(dq.shape[1:3], dtype=torch.bool, device=dq.device)
        drawn[self.rows[:, None], self.heads] = True
        return not bool(dq[:, ~drawn].any())


RunAtOnce = Callable[[list[Callable[[], dict[str, Tensor]]]], list[dict[str, Tensor]]]  #: each call in its own thread
FurtherCheck = Callable[[Oracle, Backend, str, RunAtOnce], list[str]]


def further_checks(backend: Backend) -> tuple[FurtherCheck, ...]:
    """What an example's oracle can check besides a call. Those of torch.compile compile in one thread, for one mode."""
    found = Oracle.second_call_failures, Oracle.at_once_failures, Oracle.call_here_failures
    return found[:1] if traces(backend) else found


def expected_of(example: Example, grad_lse: Tensor | None = None, keep: Tensor | None = None) -> dict[str, Expected]:
    """The expected results for every row and head, by name. Raises NoReference.

    Args:
        grad_lse: [batch, heads, q_len], the gradient of lse where the example has one of out; None: zero.
        keep: dropout factors [batch, heads, q_len, k_len]; None: all 1.
    """
    example = example.without_dropout().exact()
    problem, device = example.problem, example.q.device
    every = torch.arange(problem.q_len, device=device), torch.arange(problem.heads, device=device)
    sample = replace(_Sample.of(example, *every, None if grad_lse is None else exactly(grad_lse)), keep=keep)
    with reference(), _threads_for(problem):
        return sample.expected()


def _parts(result: object) -> tuple[Tensor, Tensor | None]:
    if isinstance(result, Tensor):
        return result, None
    if type(result) is tuple and len(result) == 2 and all(isinstance(part, Tensor) for part in result):
        return result
    raise TypeError(f"returned {type(result).__name__}, not out or (out, lse)")


def _grad_lse(problem: Problem, rows: Tensor, heads: Tensor) -> Tensor | None:
    """Draw a gradient of lse [batch, heads, q_len], zero off the drawn rows and heads; None if lse is not returned."""
    if not problem.return_lse:
        return None
    generator = torch.Generator().manual_seed(0)
    wide = sum_dtype(problem.dtype)
    drawn = torch.randn(problem.batch, len(heads), len(rows), generator=generator, dtype=wide)
    whole = torch.zeros(problem.batch, problem.heads, problem.q_len, dtype=wide, device=problem.device)
    whole[:, heads[:, None], rows] = drawn.to(problem.device)
    return whole


def draw(problem: Problem, pairs: int) -> tuple[Tensor, Tensor]:
    """Draw the query rows and heads to compare: all if that is little work, else first, last and some between."""
    generator = torch.Generator().manual_seed(0)
    few = max(1, KEY_BYTES // (problem.batch * problem.k_len * problem.head_dim * 8))
    if pairs < FEW_PAIRS:
        few = min(few, max(FEWEST_HEADS, pairs // (problem.batch * problem.k_len * FEWEST_ROWS)))
    heads = _sample(problem.heads, few, generator)
    rows = max(FEWEST_ROWS, pairs // (problem.batch * len(heads) * problem.k_len))
    return _sample(problem.q_len, rows, generator), heads


@dataclass(frozen=True, slots=True)
class _Sample:
    """The drawn rows and heads of q and of the gradients, and the heads of k and v that they read.

    `counts` is the multiplicity (`numerics.multiplicity_of`), `keep` are dropout factors; `kv_index` maps a drawn
    head to its head in `k`.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor | None
    grad_lse: Tensor | None
    counts: Tensor | None
    kv_index: Tensor
    terms: formula.ScoreTerms
    bias: Tensor | None
    keep: Tensor | None = None

    @classmethod
    def of(cls, example: Example, rows: Tensor, heads: Tensor, grad_lse: Tensor | None) -> _Sample:
        problem, masks = example.problem, example.masks
        kv, index = torch.unique(heads // (problem.heads // problem.kv_heads), return_inverse=True)
        grad = None if example.grad is None else example.grad[:, rows[:, None], heads]
        counts = multiplicity_of(problem, heads.tolist(), rows, masks)
        q = example.q.detach()[:, rows[:, None], heads]
        keys, values = example.k.detach()[:, :, kv], example.v.detach()[:, :, kv]
        lse = None if grad_lse is None else grad_lse[:, heads[:, None], rows]
        if counts is not None:
            # Hidden entries (count 0) must not matter: clear them, so that NaN there enters no expected value.
            q_seen, k_seen = _visible(counts, len(heads), index, len(kv))
            q, grad = q.where(q_seen, 0.0), None if grad is None else grad.where(q_seen, 0.0)
            keys, values = keys.where(k_seen, 0.0), values.where(k_seen, 0.0)
            lse = None if lse is None else lse.where(q_seen[..., 0].transpose(1, 2), 0.0)
        bias = masks["bias"].detach() if problem.bias_needs_grad else None
        others = {name: x.detach() for name, x in masks.items() if bias is None or name != "bias"}
        terms = formula.score_terms_of(problem, heads.tolist(), rows, others, torch.float64)
        bias = None if bias is None else formula.bounded(rows_of_bias(bias, heads.tolist(), rows), bias.dtype)
        return cls(problem, q, keys, values, grad, lse, counts, index, terms, bias)

    def evaluate(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Evaluate out, lse and, where there is a gradient, dq, dk and dv in a dtype; float64 gives the exact ones."""
        with torch.set_grad_enabled(self.grad is not None):
            q, k, v = (x.to(dtype, copy=True).requires_grad_(self.grad is not None) for x in (self.q, self.k, self.v))
            keys, values = k[:, :, self.kv_index], v[:, :, self.kv_index]
            wide, exact = sum_dtype(dtype), dtype == torch.float64
            bias = None if self.bias is None else self.bias.to(wide, copy=True).requires_grad_()
            terms, run = self._terms(wide, bias), formula.formula if exact else formula.rounded
            out, lse = run(q, keys, values, self.counts, self.problem.scale, self.keep, terms)
            found = {"out": out.detach(), "lse": lse.detach()}
            if self.grad is not None:
                results, weights = [out], [self.grad.to(dtype)]
                if self.grad_lse is not None:
                    results, weights = [out, lse], [*weights, self.grad_lse.to(lse.dtype)]
                inputs = (q, k, v) if bias is None else (q, k, v, bias)
                found.update(zip(GRADIENTS, gradients(results, inputs, weights)))
        return found

    def _terms(self, dtype: torch.dtype, bias: Tensor | None) -> formula.ScoreTerms:
        """The score terms in a dtype, with a bias that gets a gradient."""
        softcap, added = self.terms
        added = None if added is None else added.to(dtype)
        if bias is not None:
            finite = bias.masked_fill(bias == -math.inf, 0.0)
            added = finite if added is None else added + finite
        return formula.ScoreTerms(softcap, added)

    def expected(self) -> dict[str, Expected]:
        """The exact results, and what a correct one may differ by."""
        exact, rounded = (self.evaluate(dtype) for dtype in (torch.float64, self.problem.dtype))
        wide = sum_dtype(self.problem.dtype)  # enough for bounds, and half the time of float64
        terms = self._terms(wide, None if self.bias is None else self.bias.to(wide))
        tensors = (self.q, self.k, self.v, self.kv_index, self.counts, self.grad, self.grad_lse)
        bounds = formula.rounding_errors(self.problem, *tensors, terms, exact)
        most = 1.0 if self.keep is None else float(self.keep.max())
        off = {name: 2 * _error(rounded[name], value) + most * bounds[name] for name, value in exact.items()}
        return {name: Expected(value, off[name]) for name, value in exact.items()}


def _visible(counts: Tensor, heads: int, kv_index: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Queries that see any key and keys that any query sees.

    Both are bool, [batch or 1, queries, heads, 1] and [batch or 1, keys, kv_heads, 1].
    """
    seen = (counts if counts.ndim == 4 else counts[None]) > 0
    seen = seen.expand(-1, heads, -1, -1)
    by_head = seen.any(2).transpose(1, 2)
    keys = torch.zeros(*by_head.shape[:2], kv_heads, dtype=torch.int32, device=counts.device)
    keys.index_add_(2, kv_index, by_head.to(torch.int32))
    return seen.any(3).transpose(1, 2).unsqueeze(-1), keys.unsqueeze(-1) > 0


def _sample(size: int, count: int, generator: torch.Generator) -> Tensor:
    if count >= size:
        return torch.arange(size)
    inner = torch.randperm(size - 2, generator=generator)[: count - 2] + 1 if count > 2 else torch.empty(0)
    ends = torch.tensor([size - 1] if count == 1 else [0, size - 1])
    return torch.cat([ends, inner.long()]).sort().values


def _contract_failures(found: dict[str, Tensor], problem: Problem) -> list[str]:
    """Texts for a missing lse, wrong shapes, wrong dtypes and NaN."""
    q_shape = (problem.batch, problem.q_len, problem.heads, problem.head_dim)
    kv_shape = (problem.batch, problem.k_len, problem.kv_heads, problem.head_dim)
    shapes: dict[str, tuple[int, ...]] = {"out": q_shape, "dq": q_shape, "dk": kv_shape, "dv": kv_shape}
    shapes["lse"] = (problem.batch, problem.heads, problem.q_len)
    shapes["dbias"] = (*problem.bias, problem.q_len, problem.k_len)
    wide = sum_dtype(problem.dtype)
    failures = []
    if problem.return_lse and "lse" not in found:
        failures.append("lse was asked for and not returned")
    for name, tensor in found.items():
        dtype = wide if name == "lse" else problem.dtype
        if tuple(tensor.shape) != shapes[name]:
            failures.append(f"{name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        elif tensor.dtype != dtype:
            failures.append(f"{name} is {tensor.dtype}, not {dtype}")
        elif bool(tensor.isnan().any()):
            failures.append(f"{name} has NaN")
    return failures


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; infinite where one is -inf and the other is not."""
    found = found.double()
    both = found == exact  # equal infinities differ by nothing
    difference = torch.where(both, 0.0, (found - exact).abs())
    return float(difference.max()) if difference.numel() else 0.0
