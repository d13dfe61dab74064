"""Builds a backend from a dense kernel: patterns by `branches.run`, refusals from declared limits."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes, differentiable, is_result_known
from attn_dispatch.kernels.branches import run as branches
from attn_dispatch.kernels.branches.plan import BranchPlan, plan_of
from attn_dispatch.kernels.contract import Backend, Refusal, Result, refuse_pattern, refuse_sinks
from attn_dispatch.kernels.dense import Kernel
from attn_dispatch.kernels.device_cache import DeviceCache
from attn_dispatch.kernels.limits import Limits
from attn_dispatch.machine.environment import installed
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.torch_settings import current_flash

#: The distributions of what `torch.nn.attention.activate_flash_attention_impl` activates.
FLASH_LIBRARIES = {"FA3": "flash_attn_3", "FA4": "flash-attn-4"}


def torch_version() -> str:
    return str(torch.__version__)


def flash_version() -> str:
    """PyTorch's version, and what takes the place of its flash kernel."""
    other = current_flash()
    library = installed(FLASH_LIBRARIES[other]) if other in FLASH_LIBRARIES else None
    return " ".join(filter(None, (torch_version(), other, library)))


class Package(NamedTuple):
    """A library that an adapter calls. It is imported for the first problem without other refusals.

    Args:
        distribution: the name of the installed distribution.
        hint: how to install it.
        module: the module to import.
        oldest: the first version with the functions that the adapter calls.
        fault: from the module, why it cannot be used; empty if it can.
        environment: variables that the module reads at its import; those that the user has set stay.
    """

    distribution: str
    hint: str
    module: str
    oldest: tuple[int, ...]
    fault: Callable[[Any], str] = lambda module: ""
    environment: Callable[[], Mapping[str, str]] = dict

    def load(self) -> Any:
        """The module; imports it."""
        if self.module not in sys.modules:
            for name, value in self.environment().items():
                os.environ.setdefault(name, value)
        return importlib.import_module(self.module)

    def version(self) -> str:
        """The installed version.

        Raises:
            PackageNotFoundError: the package is not installed.
        """
        found = installed(self.distribution)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(self.distribution)
        return found

    def refusals(self) -> list[Refusal]:
        version = installed(self.distribution)
        if version is None:
            return [Refusal("not_installed", f"package {self.distribution} is not installed ({self.hint})")]
        if _numbers(version) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            text = f"package {self.distribution} is {version}, needs {oldest} or newer ({self.hint})"
            return [Refusal("not_installed", text)]
        return []

    def load_refusals(self) -> list[Refusal]:
        """Refusals that only an import reveals."""
        fault = _load_fault(self)
        return [Refusal("not_installed", f"package {self.distribution} cannot be used: {fault}")] if fault else []


@cache
def _load_fault(package: Package) -> str:
    try:
        return package.fault(package.load())
    except Exception as error:  # noqa: BLE001 - a library built for another PyTorch may fail in any way
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


class Variant(NamedTuple):
    """One kernel of a backend with its limits.

    Args:
        kernel: makes the adapter for a problem.
        title: names the kernel where a backend has several.
        patterns: the supported ones; Window requires an adapter that passes the window to its kernel.
    """

    limits: Limits
    kernel: Callable[[Problem], Kernel]
    title: str = ""
    package: Package | None = None
    patterns: tuple[type[Pattern], ...] = (Dense, Dilated)

    def refusals(self, problem: Problem) -> list[Refusal]:
        found = self.package.refusals() if self.package else []
        found += self.limits.refusals(problem) + (refuse_pattern(problem, self.patterns) or refuse_sinks(problem))
        if found:
            return found
        plan = self.plan(problem, self.kernel(problem))
        pieces = [(piece.k.rows, piece.q.segments) for block in plan.blocks for piece in block.pieces]
        batch = min(plan.batch_step, problem.batch)
        if pieces:  # none where no query is selected
            found = self.limits.piece_refusals(min(k for k, _ in pieces), batch * max(s for _, s in pieces))
        if problem.dropout_p and (plan.single is None or batch < problem.batch):
            found.append(
                Refusal("dropout", "drops weights in one call of the kernel, which has not all of this pattern")
            )
        if not self.limits.lse and any(not piece.fresh_q for block in plan.blocks for piece in block.pieces):
            found.append(Refusal("lse", "returns no lse, by which the parts of this pattern are joined"))
        return found or (self.package.load_refusals() if self.package else [])

    def plan(self, problem: Problem, kernel: Kernel) -> BranchPlan:
        if isinstance(problem.pattern, Window | Form):
            problem = replace(problem, pattern=Dense())
        plan = plan_of(problem, kernel.grouped)
        assert plan is not None  # refusals passes only patterns that have a plan
        return plan


@dataclass(frozen=True, eq=False)
class Branched(Backend):
    """A backend of one or more dense kernels, in order of preference.

    Args:
        also: refusals that limits cannot express.
    """

    name: str
    variants: tuple[Variant, ...]
    library_version: Callable[[], str] = torch_version
    also: Callable[[Problem], list[Refusal]] = lambda problem: []
    specialized_trains = True

    def version(self) -> str:
        return self.library_version()

    def refusals(self, problem: Problem) -> list[Refusal]:
        found = []
        for variant in self.variants:
            refused = variant.refusals(problem)
            if not refused:
                return self.also(problem)
            found.append((variant, refused))
        return _combined_refusals(found) + self.also(problem)

    def flops(self, problem: Problem) -> int:
        _, plan, _ = _prepared(self, problem)
        pairs = plan.pairs
        if isinstance(problem.pattern, Form):
            pairs = problem.heads * problem.pattern.pairs(problem.q_len, problem.k_len, ())
        if isinstance(problem.pattern, Window) and problem.pattern.left is not None:
            right = problem.k_len if problem.pattern.right is None else problem.pattern.right
            pairs = min(pairs, problem.heads * problem.q_len * (problem.pattern.left + 1 + right))
        return problem.batch * pairs * problem.head_dim * (14 if problem.needs_grad else 4)

    def workspace_bytes(self, problem: Problem) -> int:
        return _prepared(self, problem)[2]

    def kernel(self, problem: Problem) -> Kernel:
        """The kernel that runs a problem, one without refusals."""
        return _prepared(self, problem)[0]

    def partial(self, problem: Problem, key_mask: Tensor | None = None) -> Passes:
        """The passes for queries that also see other keys (see `contract.Backend`)."""
        kernel, plan, _ = _prepared(self, problem)
        return branches.passes(problem, plan, kernel, {} if key_mask is None else {"key_mask": key_mask})

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        kernel, plan, _ = _prepared(self, problem)
        return branches.run(q, k, v, problem, plan, kernel, tensors)

    def takes_documents(self, problem: Problem) -> bool:
        row = _as_row(problem)
        alone = problem.pattern.branches or problem.dropout_p
        return not alone and not self.refusals(row) and self.kernel(row).packs

    def run_documents(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...], **tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows as one (see `contract.Backend`)."""
        rows, row = problem.batch, _as_row(problem)
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        plan, kernel = _prepared(self, row)[1], _packed(row, self, lengths * rows)
        out, lse = branches.run(q, k, v, row, plan, kernel, tensors)
        return torch.unflatten(out[0], 0, (rows, -1)), torch.unflatten(lse[0], 1, (rows, -1)).transpose(0, 1)

    def specialized(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False
    ) -> Callable[..., Result] | None:
        """One call of an operator, else the passes of all calls alike (see `contract.Backend`)."""
        kernel, plan, _ = _prepared(self, problem)
        if problem.scale <= 0:
            return None
        alone, trains = plan.single is not None, problem.needs_grad
        call = kernel.specialized(q, k, v, plan.single.is_causal, problem.scale, heads_first) if plan.single else None
        if alone and not trains:
            return call
        passes = branches.passes(problem, plan, kernel, {})
        if heads_first or not isinstance(passes, branches.BranchPasses):  # a CUDA graph may need what hides keys
            return None
        by_operator = None if problem.return_lse or problem.deterministic or not kernel.differentiates else call

        def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
            if by_operator is not None and not is_result_known():
                return by_operator(q, k, v, problem)
            out, lse = differentiable(q, k, v, passes) if trains else passes.forward(q, k, v)
            return (out, lse) if kernel.gives_lse else out

        return run


@lru_cache(maxsize=4096)
def _as_row(problem: Problem) -> Problem:
    """The problem of a batch's rows one after the other."""
    return replace(problem, batch=1, q_len=problem.batch * problem.q_len, k_len=problem.batch * problem.k_len)


def _packed_kernel(problem: Problem, backend: Branched, lengths: tuple[int, ...]) -> Kernel:
    return backend.kernel(problem).packed(lengths, problem.device)


_packed = DeviceCache(_packed_kernel, most=64)


@lru_cache(maxsize=4096)
def _prepared(backend: Branched, problem: Problem) -> tuple[Kernel, BranchPlan, int]:
    variant = next((variant for variant in backend.variants if not variant.refusals(problem)), None)
    assert variant is not None, f"{backend.name} refuses {problem}"
    kernel = variant.kernel(problem)
    plan = variant.plan(problem, kernel)
    return kernel, plan, branches.workspace_bytes(problem, plan, kernel)


def _combined_refusals(found: list[tuple[Variant, list[Refusal]]]) -> list[Refusal]:
    """Each refusal once: those of all variants as they are, the others with the variant's title.

    Variants for other device types are left out if there are others; so are those with missing packages, unless they
    would run the problem.
    """
    missing_only = [(v, refused) for v, refused in found if {refusal.code for refusal in refused} == {"not_installed"}]
    for code, shown in (("device", []), ("not_installed", missing_only)):
        rest = [(v, refused) for v, refused in found if code not in {refusal.code for refusal in refused}]
        found = [*rest, *shown] if rest else found
    shared = set.intersection(*(set(refused) for _, refused in found))
    missing = {v.package.distribution: v.package.hint for v, _ in found if v.package and v.package.refusals()}
    if len(missing) > 1 and len(missing) == len({v.package and v.package.distribution for v, _ in found}):
        text = f"none of {', '.join(missing)} is installed ({list(missing.values())[-1]})"
        return [Refusal("not_installed", text), *(refusal for refusal in found[0][1] if refusal in shared)]
    combined: dict[Refusal, None] = {}
    for variant, refused in found:
        for refusal in refused:
            title = f"{variant.title}: " if variant.title and refusal not in shared else ""
            combined[Refusal(refusal.code, title + refusal.text)] = None
    return list(combined)
