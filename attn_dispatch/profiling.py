"""`profile`: measures problems one after another, within a time budget if one is given.

`profile_over` distributes problems of one device over ranks and measures sharded problems jointly; every rank gets
every decision, with or without a shared cache folder.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attn_dispatch.decisions import decide, look_up, trial_limits, unmeasured
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.errors import InvalidInput
from attn_dispatch.recording import Use, read_record
from attn_dispatch.ring import group_decision
from attn_dispatch.ring.link import Link, link_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, Layout, deal
from attn_dispatch.ring.sharded_problem import ShardedProblem
from attn_dispatch.ring.trial import Trial, held_of
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.checks import real, reals
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.spec.torch_settings import settings
from attn_dispatch.store.decision import Decision, decode, encode
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request
from attn_dispatch.tuning.example import make, pattern_data

MIN_SECONDS = 0.05  #: least budget of a problem
BACKWARD = 2.5  #: operations of a backward pass, relative to the forward pass: five matrix products to two
BUDGET_USED = 0.5  #: share of its budget that a trial which could not settle its choice takes at least

Report = Callable[[int, Explanation], None]

Explanations = dict[int, Explanation]


def profile(
    problems: Iterable[Problem] | str | os.PathLike[str],
    *,
    budget_s: float | None = None,
    progress: bool = True,
    force: bool = False,
    report: Report | None = None,
    weights: Sequence[float] | None = None,
) -> list[Explanation]:
    """Measure problems and store each decision as soon as it is made, so that an interruption loses none.

    Args:
        problems: `Problem`s, or a file that `record` wrote. Of few queries and many keys, the next power of two of
            keys is measured, which decides for all below it.
        budget_s: seconds for all problems; None for no limit. What one leaves goes to the remaining ones.
        progress: show a bar with the remaining time on stderr.
        force: measure again problems that have a valid decision.
        report: called with each problem's index and explanation as soon as it is decided.
        weights: of the problems, in whose proportion the budget is shared; those with the largest are measured
            first. By default, of a file, the time that each problem took in the recorded run (`weights_of_uses`);
            else all are equal.

    Returns:
        One explanation for each problem; its `choice` is None if no backend can run the problem.

    Raises:
        InvalidInput: the mode is `off`, which uses no disk; or the budget is not a positive number.
    """
    if mode() == "off":
        raise InvalidInput("$ATTN_DISPATCH_MODE is 'off', which touches no disk: profile cannot store decisions")
    budget_s = _checked_budget(budget_s)
    if isinstance(problems, str | os.PathLike):
        uses = read_record(problems)
        problems, weights = list(uses), weights_of_uses(uses) if weights is None else weights
    problem_list = checked_problems(problems)
    shares = _checked_weights(weights, len(problem_list))
    end = None if budget_s is None else time.monotonic() + budget_s
    found: Explanations = {}
    with progress_bar("measuring", len(problem_list), progress) as advance:
        for index, share in _largest_first(range(len(problem_list)), shares):
            problem = problem_list[index]
            found[index] = _measure_problem(_measured_for(problem), _share_of(end, share), force)
            advance(str(problem))
            if report is not None:
                report(index, found[index])
    return [found[index] for index in range(len(problem_list))]


def checked_problems(problems: object) -> list[Problem]:
    """The problems as a list. Raises InvalidInput: there is something else."""
    found: list[Any] = list(problems) if isinstance(problems, Iterable) else [problems]
    for problem in found:
        if not isinstance(problem, Problem):
            raise InvalidInput(f"problems must be Problems, or a file that record() wrote, got {problem!r}")
    return found


def _measured_for(problem: Problem) -> Problem:
    """The problem to measure: itself where no backend runs the one whose decision it would share."""
    other = measured_for(problem)
    return other if other == problem or unmeasured.runs(other) else problem


def weights_of_uses(uses: Mapping[Problem, Use]) -> list[float]:
    """The time that each problem of a recorded run took: of its calls, and of their backward passes, which are not
    recorded and take `BACKWARD` times as long.
    """
    return [use.seconds * (1 + BACKWARD * problem.needs_grad) for problem, use in uses.items()]


def _checked_budget(budget_s: object) -> float | None:
    found = None if budget_s is None else real(budget_s)
    if found is not None and not found > 0:
        raise InvalidInput(f"budget_s must be a number > 0 or None, got {budget_s!r}")
    return found


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    found = [1.0] * count if weights is None else reals(weights)
    if len(found) != count or not all(0 <= weight < math.inf for weight in found):
        raise InvalidInput(f"weights must be a number >= 0 for each of the {count} problems, got {weights!r}")
    largest = max(found, default=0.0) or 1.0
    return [weight / largest for weight in found]  # whose sum is finite


def _largest_first(indices: Sequence[int], weights: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The indices, those with the largest weights first, each with its share of what the earlier ones left."""
    left = math.fsum(weights[index] for index in indices)
    for number, index in enumerate(sorted(indices, key=lambda index: -weights[index])):
        yield index, weights[index] / left if left > 0 else 1 / (len(indices) - number)
        left -= weights[index]


@contextmanager
def as_called(problem: Problem) -> Iterator[None]:
    """Inside, PyTorch has the settings of the problem's calls, and no other thread measures."""
    precision = problem.matmul_precision if problem.dtype == torch.float32 else None
    if problem.deterministic and problem.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS refuses
    with decide.measuring, settings(problem.deterministic, precision):
        yield


def _measure_problem(problem: Problem, share_s: float | None, force: bool) -> Explanation:
    """Measure missing and outdated candidates; all of them if forced, or after a provisional decision."""
    budget_ms = math.inf if share_s is None else share_s * 1e3
    # Another thread may call attend() with the same problem.
    if problem.batch_invariant:  # one backend computes it, however fast others are
        return decide.explain_problem(problem)
    with as_called(problem):
        request = Request.of(problem)
        stored = look_up.look_up(request, budget_ms)
        if stored is not None and not look_up.is_confirmed(stored.decision):
            stored = None  # another machine's, which nothing here has confirmed
        if stored is not None and (force or _is_open(stored.decision, budget_ms)):
            stored = look_up.StoredDecision(stored.decision, stored.choice)  # `changed` empty: all candidates
        elif stored is not None and stored.is_valid:
            return Explanation.of(stored.decision)
        decision = trial_limits.measure(request, share_s, **look_up.as_prior(stored))
        if decision is None:
            return decide.explain_problem(problem)
        decide.adopt(problem, decision)
        return Explanation.of(decision)


def _is_open(decision: Decision, budget_ms: float) -> bool:
    """Whether a provisional decision was made in less time than this budget: where a caller waited, for example."""
    return bool(decision.provisional) and decision.elapsed_ms < budget_ms * BUDGET_USED


def _share_of(end: float | None, share: float) -> float | None:
    """Seconds of a share of the time until `end`."""
    return None if end is None else max(MIN_SECONDS, (end - time.monotonic()) * min(share, 1.0))


@contextmanager
def progress_bar(doing: str, total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, where it is shown, and what to call after each of `total` steps, with a text."""
    if not shown:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # A narrow terminal cuts the end of the text, not the count and the time.
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (doing, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def profile_over(
    problems: Sequence[Problem],
    mesh: Any = "world",
    *,
    kind: str = CONTIGUOUS,
    budget_s: float | None = None,
    force: bool = False,
    progress: bool = True,
    report: Report | None = None,
    weights: Sequence[float] | None = None,
) -> list[Explanation]:
    """Measure problems on all ranks of a mesh; a collective call with the same arguments on every rank.

    Args:
        problems: those with `ranks` 1 are distributed over the ranks, and ranks that share a CPU measure one after
            another; those with as many ranks as the mesh are measured jointly, with even shards.
        mesh: as `attend` takes it.
        kind: of the shards, "contiguous" or "zigzag".
        budget_s: seconds for a rank's problems of one device, and again for all sharded ones; None for no limit.
        force: measure again problems that have a valid decision.
        progress: show a bar on stderr of the first rank.
        report: called on every rank with each problem's index and explanation when all are decided.
        weights: as for `profile`, of a rank's problems of one device, and of all sharded ones.

    Returns:
        One explanation for each problem, on every rank.

    Raises:
        InvalidInput: a problem has another number of ranks than the mesh. RankLost: a rank is gone.
    """
    budget_s = _checked_budget(budget_s)
    link = link_of(mesh)
    for problem in problems:
        if problem.ranks not in (1, link.size):
            raise InvalidInput(f"the mesh has {link.size} ranks, but a problem has ranks={problem.ranks}: {problem}")
    shares = _checked_weights(weights, len(problems))
    found = _measure_unsharded(problems, shares, link, budget_s, force, progress)
    sharded = [index for index, problem in enumerate(problems) if problem.ranks > 1]
    end = None if budget_s is None else time.monotonic() + budget_s
    for index, share in _largest_first(sharded, shares):
        found[index] = _measure_sharded(problems[index], link, kind, _share_of(end, share), force)
    for index in sorted(found) if report is not None else ():
        assert report is not None
        report(index, found[index])
    return [found[index] for index in range(len(problems))]


def _measure_unsharded(
    problems: Sequence[Problem],
    weights: Sequence[float],
    link: Link,
    budget_s: float | None,
    force: bool,
    progress: bool,
) -> Explanations:
    """Measure this rank's share of the problems of one device, and exchange the decisions with the other ranks."""
    single = [index for index, problem in enumerate(problems) if problem.ranks == 1]
    own = [index for index, _ in _largest_first(single, weights)][link.rank :: link.size]
    hosts = link.all_gather_objects((link.host, problems[0].device.type if problems else "cpu"))
    rounds = [hosts[:rank].count(hosts[rank]) if hosts[rank][1] == "cpu" else 0 for rank in range(link.size)]
    done: list[Explanation] = []
    for round_number in range(max(rounds) + 1):
        if round_number == rounds[link.rank] and own:
            shown, shares = progress and link.rank == 0, [weights[index] for index in own]
            mine = [problems[index] for index in own]
            done = profile(mine, budget_s=budget_s, force=force, progress=shown, weights=shares)
        link.barrier()  # concurrent measurements on one CPU would disturb each other
    decisions = [look_up.read_stored(Request.of(_measured_for(problems[index]))) for index in own]
    gathered = link.all_gather_objects(
        [(index, each, made and encode(made)) for index, each, made in zip(own, done, decisions, strict=True)]
    )
    found: Explanations = {}
    for rank, share in enumerate(gathered):
        for index, explanation, encoded in share:
            found[index] = explanation
            if encoded and rank != link.rank:
                Store(cache_folder()).put(decode(encoded))
    return found


def _measure_sharded(problem: Problem, link: Link, kind: str, budget_s: float | None, force: bool) -> Explanation:
    layout = Layout(deal(problem.q_len, link.size), kind)
    length = layout.lengths[link.rank]
    own = make(replace(problem, ranks=1, q_len=length, k_len=length, has_seq_lens=False))
    masks = dict(own.masks)
    if problem.has_seq_lens:
        masks["seq_lens"] = torch.full((problem.batch,), problem.q_len, device=problem.device)
    budget_ms = None if budget_s is None else budget_s * 1e3
    whole = pattern_data(problem, torch.Generator().manual_seed(0))
    masks.pop("pattern_data", None)
    sharded = ShardedProblem(problem, layout, link, held_of(problem, whole))
    measure = Trial(sharded, (own.q, own.k, own.v), masks).rows
    return Explanation.of(group_decision.decide_together(sharded, measure, None, force=force, budget_ms=budget_ms))
