"""The race of the blocks of `triton`'s kernels: once for each GPU, dtype, head_dim and kernel; `kept_blocks` keeps it.

Each block is a candidate of a trial. The whole call is timed, with the blocks of later calls in the other kernels.
`profile --blocks` and `tools.checks.gpu_check` run it: a first call would have to wait for about twenty compilations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from attn_dispatch.decisions import kept_blocks
from attn_dispatch.decisions.decide import measuring
from attn_dispatch.decisions.kept_blocks import Winner
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, Refusal, Result
from attn_dispatch.kernels.triton.blocks import BlockConfig, use_of
from attn_dispatch.kernels.triton.support import COMPILE_MS, TritonKernel
from attn_dispatch.log import logger
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.text import one_line
from attn_dispatch.tuning.candidates import Request, utc_now
from attn_dispatch.tuning.rounds import exhausted
from attn_dispatch.tuning.tuner import UNLIMITED, Trial

LENGTH, HEADS = 8192, 8  #: of the example, which is causal


class Outcome(NamedTuple):
    """The winner of one race, None where no block is right; and why blocks were dropped, by their text."""

    use: str
    winner: Winner | None
    dropped: dict[str, str]
    changed: bool  #: whether other calls than before take another block

    def __str__(self) -> str:
        found = "no block is right" if self.winner is None else str(self.winner)
        return "; ".join([f"{self.use}: {found}", *(f"{block} dropped: {why}" for block, why in self.dropped.items())])


@dataclass(frozen=True)
class BlockBackend(Backend):
    """`triton` with a block for one kernel, as a backend that the gate knows nothing of.

    What it compiles is declared for this problem alone, so that its hard cases are few.
    """

    backend: Any
    kernel: TritonKernel
    block: BlockConfig
    name: str = field(default="triton", init=False)

    def version(self) -> str:
        return f"{self.backend.version()} {self.kernel.kernel} {self.block}"

    def refusals(self, problem: Problem) -> list[Refusal]:
        found: list[Refusal] = self.backend.refusals(problem)
        return found

    def workspace_bytes(self, problem: Problem) -> int:
        return int(self.backend.workspace_bytes(problem))

    def flops(self, problem: Problem) -> int:
        return int(self.backend.flops(problem))

    def first_call_ms(self, problem: Problem) -> float:
        return COMPILE_MS * len(self.backend.kernels_for(problem)) if problem.device.type == "cuda" else 0.0

    def run(self, q: Any, k: Any, v: Any, problem: Problem, **tensors: Any) -> Result:
        found: Result = self.backend.run(q, k, v, problem, blocks={self.kernel.kernel: self.block}, **tensors)
        return found


def race_blocks(
    problems: Iterable[Problem], *, force: bool = False, report: Callable[[Outcome], object] = lambda outcome: None
) -> list[Outcome]:
    """Race the blocks of all kernels that `triton` runs these problems with, and keep the winners.

    Args:
        force: race again what is kept.
        report: called with each outcome as soon as it is kept.

    Raises:
        BackendFailed: a block left the device unusable. ImportError: triton is missing.
    """
    backend: Any = registry.load("triton")
    done: dict[str, Outcome] = {}
    with measuring:
        for each, example in _races(backend, problems):
            use, request = use_of(each.kernel, example), Request.of(example)
            kept = kept_blocks.read(cache_folder(), request.silicon)
            known = not force and kept.version == backend.version() and use in kept.winners
            if known or use in done:
                continue
            before = backend.block_configs(each, example)[0]
            winner, dropped = _race(backend, each, request)
            if winner is not None:
                kept_blocks.keep(request.silicon, backend.version(), {use: winner})
            done[use] = Outcome(use, winner, dropped, backend.block_configs(each, example)[0] != before)
            report(done[use])
    return list(done.values())


def _races(backend: Any, problems: Iterable[Problem]) -> Iterator[tuple[TritonKernel, Problem]]:
    """Each kernel that runs one of the problems, with the example to race it on: the forward kernel without others."""
    for problem in problems:
        if backend.refusals(replace(problem, ranks=1)):
            continue
        shape = (1, LENGTH, HEADS, problem.head_dim)
        example = problem_of(shape, Dense(is_causal=True), problem.dtype, problem.device)
        example = replace(example, matmul_precision=problem.matmul_precision)
        for each in backend.kernels_for(problem):
            yield each, replace(example, needs_grad=each is not backend.FORWARD)


def _race(backend: Any, each: TritonKernel, request: Request) -> tuple[Winner | None, dict[str, str]]:
    """The fastest block that is right, the table's where none is proven faster; and why others were dropped."""
    found = [
        replace(candidate, variant=str(block))
        for block in backend.raced_blocks(each, request.problem)
        for candidate in request.candidates_of(BlockBackend(backend, each, block), None)
    ]
    able = [candidate for candidate in found if candidate.row is None]
    trial = Trial(request, found, able, None, None, waiting=True, limits=UNLIMITED)
    chosen = exhausted(trial.steps()) and trial.chosen
    rows = {candidate.title: candidate.row for candidate in found if candidate.row} | trial.rows
    why = {title: row.reason for title, row in rows.items()}
    why |= {title: one_line(error) for title, error in (trial.race.rounds.failures if trial.race else {}).items()}
    dropped = {title.removeprefix("triton "): reason for title, reason in why.items()}
    for title, reason in dropped.items():
        logger.info("%s in blocks of %s is dropped: %s", use_of(each.kernel, request.problem), title, reason)
    if not chosen or trial.race is None:
        return None, dropped
    times, block = trial.race.rounds.timings, cast(BlockBackend, chosen.backend).block
    speedup = round(next(iter(times.values())).median_ms / times[chosen.title].median_ms, 3)
    return Winner(block.rows, block.columns, block.warps, block.stages, speedup, utc_now()), dropped
