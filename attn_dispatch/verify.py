"""The gate: a candidate's out, lse, dq, dk and dv against the formula in float64, within a derived tolerance.

Where the whole formula would take too long, some query rows and heads are drawn, and the gradient of out is zero
everywhere else. Then dq is zero off the rows drawn, and dk and dv, at every key, are sums over those rows alone: the
candidate still runs at full size, and what is compared is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.contract import Backend
from attn_dispatch.example import Example
from attn_dispatch.problem import Problem

PAIRS = 2**23  #: query-key pairs that are worked out in float64
KEY_BYTES = 2**27  #: of widened keys, and again of values
FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor should be, in float64, and how far from it a right result may be."""

    value: Tensor
    tolerance: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest absolute error of out, and every way in which the result is wrong."""

    error: float
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """Expected results for one example."""

    example: Example
    rows: Tensor
    heads: Tensor
    grad: Tensor | None
    expected: dict[str, Expected]

    @classmethod
    def of(cls, example: Example, seed: int = 0) -> Gate:
        example = example.without_dropout()
        rows, heads = draw(example.problem, seed)
        rows, heads = rows.to(example.problem.device), heads.to(example.problem.device)
        grad = None
        if example.grad is not None:
            grad = torch.zeros_like(example.grad)
            grad[:, rows[:, None], heads] = example.grad[:, rows[:, None], heads]
        exact = _formula(example, rows, heads, torch.float64)
        rounded = _formula(example, rows, heads, example.problem.dtype)
        expected = {
            name: Expected(value, tolerance(name, value, rounded[name].double(), example.problem))
            for name, value in exact.items()
        }
        return cls(example, rows, heads, grad, expected)

    def run(self, backend: Backend) -> dict[str, Tensor]:
        """The candidate's tensors, at full size."""
        example = self.example
        with torch.set_grad_enabled(example.problem.needs_grad):
            result = backend.run(example.q, example.k, example.v, example.problem, **example.masks)
        out, lse = (result, None) if isinstance(result, Tensor) else result
        found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
        if self.grad is not None:
            grads = torch.autograd.grad(out, (example.q, example.k, example.v), self.grad)
            found.update(zip(("dq", "dk", "dv"), grads))
        return found

    def check(self, found: dict[str, Tensor]) -> Verdict:
        """Compare what `run` gave."""
        failures = _contract_failures(found, self.example.problem)
        if failures:
            return Verdict(math.inf, tuple(failures))
        errors = {
            name: _error(self._drawn(name, found[name]), e.value) for name, e in self.expected.items() if name in found
        }
        for name, error in errors.items():
            if not error <= self.expected[name].tolerance:
                failures.append(f"{name} is off by {error:.2e}, more than {self.expected[name].tolerance:.2e}")
        if "dq" in found and not self._zero_elsewhere(found["dq"]):
            failures.append("dq is not zero where the gradient of out is")
        return Verdict(errors["out"], tuple(failures))

    def _drawn(self, name: str, tensor: Tensor) -> Tensor:
        if name == "lse":
            return tensor[:, self.heads[:, None], self.rows]
        if name in ("out", "dq"):
            return tensor[:, self.rows[:, None], self.heads]
        group = self.example.problem.heads // self.example.problem.kv_heads
        return tensor[:, :, torch.unique(self.heads // group)]

    def _zero_elsewhere(self, dq: Tensor) -> bool:
        seen = torch.zeros(dq.shape[1:3], dtype=torch.bool, device=dq.device)
        seen[self.rows[:, None], self.heads] = True
        return not bool(dq[:, ~seen].any())


def draw(problem: Problem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Query rows and heads to compare: all of them if that is little work, else the ends and some between."""
    generator = torch.Generator().manual_seed(seed)
    few = max(1, KEY_BYTES // (problem.batch * problem.k_len * problem.head_dim * 8))
    heads = _sample(problem.heads, few, generator)
    rows = max(FEWEST_ROWS, PAIRS // (problem.batch * len(heads) * problem.k_len))
    return _sample(problem.q_len, rows, generator), heads


def tolerance(name: str, exact: Tensor, rounded: Tensor, problem: Problem) -> float:
    """How far a right result may be from the exact one.

    Twice the error of an independent evaluation in the problem's own dtype, plus one rounding of the result, plus
    what sums of head_dim and k_len terms gather in the precision that kernels accumulate in.

    Source: Higham & Mary 2019, a new approach to probabilistic rounding error analysis: errors of a sum grow as the
    square root of its length.
    """
    sums = torch.finfo(torch.float64 if problem.dtype == torch.float64 else torch.float32).eps
    last = sums if name == "lse" else torch.finfo(problem.dtype).eps
    finite = exact[exact.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    growth = math.sqrt(problem.head_dim + problem.k_len)
    return 2 * _error(rounded, exact) + (last + sums * growth) * size


def _formula(example: Example, rows: Tensor, heads: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and, where the example has a gradient, dq, dk, dv, in one dtype."""
    problem, masks = example.problem, example.masks
    group = problem.heads // problem.kv_heads
    kv, index = torch.unique(heads // group, return_inverse=True)
    with torch.set_grad_enabled(example.grad is not None):
        q = _leaf(example.q[:, rows[:, None], heads], dtype)
        k, v = _leaf(example.k[:, :, kv], dtype), _leaf(example.v[:, :, kv], dtype)
        counts = manual.counts_of(problem, heads.tolist(), rows, masks.get("seq_lens"), masks.get("key_mask"))
        exact = dtype == torch.float64 and problem.dtype != torch.float64
        keys, values = k[:, :, index], v[:, :, index]
        if not exact:
            # The other order of summation makes the rounded evaluation independent, in float64 too.
            keys, values = keys.flip(1), values.flip(1)
            counts = None if counts is None else counts.flip(-1)
        out, lse = (manual.formula if exact else _rounded)(q, keys, values, counts, problem.scale)
        found = {"out": out.detach(), "lse": lse.detach()}
        if example.grad is not None:
            grad = example.grad[:, rows[:, None], heads].to(dtype)
            found.update(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), grad)))
    return found


def _rounded(q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The formula as it is commonly written: products in the inputs' dtype, the softmax in float32 or wider."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).to(wide)
    if counts is not None:
        scores = scores + counts.to(wide).log()
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).to(q.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).clone().requires_grad_(torch.is_grad_enabled())


def _sample(size: int, count: int, generator: torch.Generator) -> Tensor:
    if count >= size:
        return torch.arange(size)
    inner = torch.randperm(size - 2, generator=generator)[: count - 2] + 1 if count > 2 else torch.empty(0)
    ends = torch.tensor([size - 1] if count == 1 else [0, size - 1])
    return torch.cat([ends, inner.long()]).sort().values


def _contract_failures(found: dict[str, Tensor], problem: Problem) -> list[str]:
    """Wrong shapes and dtypes, NaN."""
    q_shape = (problem.batch, problem.q_len, problem.heads, problem.head_dim)
    kv_shape = (problem.batch, problem.k_len, problem.kv_heads, problem.head_dim)
    shapes: dict[str, tuple[int, ...]] = {"out": q_shape, "dq": q_shape, "dk": kv_shape, "dv": kv_shape}
    shapes["lse"] = (problem.batch, problem.heads, problem.q_len)
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
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
