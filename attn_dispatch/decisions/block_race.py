"""The race of the blocks of `triton`'s kernels: once for each GPU, dtype, head_dim and kernel; `kept_blocks` keeps it.

Each block is a backend to the gate: a guarded call on the example, compared with float64, before it is timed. The whole
call is timed, with the blocks of later calls in the other kernels. The winner must pass hard cases too. It is run by
`profile --blocks` and `tools.checks.gpu_check`: a first call would have to wait for about twenty compilations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

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
from attn_dispatch.tuning.candidates import Candidate, Request, utc_now
from attn_dispatch.tuning.choice import Rejected
from attn_dispatch.tuning.clocks import CudaStopwatch, HostStopwatch, Stopwatch
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import Gate
from attn_dispatch.tuning.intervals import Timing, ratio_test
from attn_dispatch.tuning.oracle import NoReference, reference
from attn_dispatch.tuning.rounds import exhausted, time_in_rounds

LENGTH, HEADS = 8192, 8  #: of the example, which is causal
RACE_S = 3.0  #: seconds of one race at most, without those that its blocks are compiled and checked in


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
    problems: Iterable[Problem],
    *,
    force: bool = False,
    report: Callable[[Outcome], object] = lambda outcome: None,
    stopwatch: Callable[[torch.device], Stopwatch] | None = None,
) -> list[Outcome]:
    """Race the blocks of all kernels that `triton` runs these problems with, and keep the winners.

    Args:
        force: race again what is kept.
        report: called with each outcome as soon as it is kept.
        stopwatch: of a device; by default the one of trials.

    Raises:
        BackendFailed: a block left the device unusable. ImportError: triton is missing.
    """
    backend: Any = registry.load("triton")
    done: list[Outcome] = []
    with measuring:
        for each, example in _races(backend, problems):
            use, request = use_of(each.kernel, example), Request.of(example)
            kept = kept_blocks.read(cache_folder(), request.silicon)
            known = not force and kept.version == backend.version() and use in kept.winners
            if known or use in {outcome.use for outcome in done}:
                continue
            before = backend.block_configs(each, example)[0]
            with suppress(NoReference):  # too little memory for the example: the table's block stays
                winner, dropped = _race(backend, each, request, (stopwatch or _stopwatch)(example.device))
                if winner is not None:
                    kept_blocks.keep(request.silicon, backend.version(), {use: winner})
                done.append(Outcome(use, winner, dropped, backend.block_configs(each, example)[0] != before))
                report(done[-1])
    return done


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


def _race(
    backend: Any, each: TritonKernel, request: Request, stopwatch: Stopwatch
) -> tuple[Winner | None, dict[str, str]]:
    """The fastest block that is right, the table's where none is surely faster; and why others were dropped."""
    with reference():
        example = make(request.problem, on_device=True)
    gate, dropped = Gate(request.problem, request.address, example), dict[str, str]()
    entrants: dict[str, tuple[BlockConfig, Candidate]] = {}
    calls, first_ms = dict[str, Callable[[], object]](), dict[str, float]()
    for block in backend.raced_blocks(each, request.problem):
        title, (candidate,) = str(block), request.candidates_of(BlockBackend(backend, each, block), None)
        if candidate.row is not None:  # quarantined, or too little memory
            dropped[title] = candidate.row.reason
            continue
        found = exhausted(gate.admit(candidate))
        if isinstance(found, Rejected):
            dropped[title] = found.reason
            continue
        entrants[title], calls[title] = (block, candidate), example.call(*candidate.backend_and_order)
        first_ms[title] = found.call_ms
    rounds = time_in_rounds(calls, budget_s=RACE_S, stopwatch=stopwatch, first_ms=first_ms, incumbents=list(calls)[:1])
    dropped |= {title: str(error) for title, error in rounds.failures.items()}
    timings = {title: timing for title, timing in rounds.timings.items() if title not in rounds.dropped}
    winner = None
    while winner is None and (best := _best(timings)) is not None:
        rejected = exhausted(gate.check_hard_cases(entrants[best][1], waiting=True))
        if rejected is None:
            first = next(iter(rounds.timings.values()))  # dropped or not
            block, speedup = entrants[best][0], first.median_ms / timings[best].median_ms
            winner = Winner(block.rows, block.columns, block.warps, block.stages, round(speedup, 3), utc_now())
        else:
            dropped[best] = rejected.reason
            del timings[best]
    for title, reason in dropped.items():
        logger.info("%s in blocks of %s is dropped: %s", use_of(each.kernel, request.problem), title, reason)
    return winner, dropped


def _best(timings: dict[str, Timing]) -> str | None:
    """The fastest, or the first one where that is not surely slower."""
    first, best = next(iter(timings), None), min(timings, key=lambda title: timings[title].median_ms, default=None)
    if first is None or best is None:
        return None
    return best if ratio_test(timings[best], timings[first]) == "faster" else first


def _stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
