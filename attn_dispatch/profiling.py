"""`profile`: problems are measured now, one after another, within a time budget if there is one.

By many ranks, problems of one device are dealt out and those of a mesh are measured together; every rank ends up with
every decision, whether or not they share a cache folder.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import dispatch
from attn_dispatch.decisions import decide, look_up
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring import group_decision
from attn_dispatch.ring.link import Link, link_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, Layout, deal
from attn_dispatch.ring.sharded_problem import ShardedProblem
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import decode, encode
from attn_dispatch.store.folder import Store
from attn_dispatch.store.problem_files import read_record
from attn_dispatch.tuning.candidates import Request

LEAST_S = 0.05  #: seconds that a problem gets however little of the budget is left

Report = Callable[[int, Explanation], None]

Found = dict[int, Explanation]


def profile(
    problems: Iterable[Problem] | str | os.PathLike[str],
    *,
    budget_s: float | None = None,
    progress: bool = True,
    force: bool = False,
    report: Report | None = None,
) -> list[Explanation]:
    """Measure problems and keep the decisions. Each is kept when it is made: interrupted, nothing is lost.

    Args:
        problems: `Problem`s, or a file that `record` wrote.
        budget_s: seconds for all of them, shared evenly among those still to come; None for no limit.
        progress: show a bar with the remaining time on stderr.
        force: measure again what is decided already.
        report: called with each problem's index and explanation as soon as it is known.

    Returns:
        One explanation for each problem. Where no backend can run one, its `choice` is None.

    Raises:
        InvalidInput: the mode is `off`, which touches no disk; or the budget is not a positive number.
    """
    if mode() == "off":
        raise InvalidInput("$ATTN_DISPATCH_MODE is 'off', which touches no disk: profile has nowhere to keep decisions")
    if budget_s is not None and not budget_s > 0:
        raise InvalidInput(f"budget_s must be a number > 0 or None, got {budget_s!r}")
    chosen = read_record(problems) if isinstance(problems, str | os.PathLike) else list(problems)
    for problem in chosen:
        if not isinstance(problem, Problem):
            raise InvalidInput(f"problems must be Problems, or a file that record() wrote, got {problem!r}")
    end = None if budget_s is None else time.monotonic() + budget_s
    found = []
    with _bar(len(chosen), progress) as advance:
        for index, problem in enumerate(chosen):
            explanation = _settle(problem, _share(end, len(chosen) - index), force)
            found.append(explanation)
            advance(str(problem))
            if report is not None:
                report(index, explanation)
    return found


def _settle(problem: Problem, share_s: float | None, force: bool) -> Explanation:
    """What holds is left alone, unless live calls told otherwise; what changed is measured by itself."""
    with decide.lock:  # another thread may meet the same problem
        return _settle_alone(problem, share_s, force)


def _settle_alone(problem: Problem, share_s: float | None, force: bool) -> Explanation:
    budget_ms = math.inf if share_s is None else share_s * 1e3
    request = Request.of(problem)
    kept = look_up.look_up(request, budget_ms)
    if kept is not None and kept.holds and kept.decision.drift is None and not force:
        return Explanation.of(kept.decision)
    if kept is not None and (force or kept.decision.drift is not None):
        kept = look_up.Found(kept.decision, kept.choice)  # all of it
    decision = decide.measure(request, share_s, kept)
    if decision is None:
        return decide.explain_problem(problem)
    dispatch.adopt(problem, decision)
    return Explanation.of(decision)


def _share(end: float | None, left: int) -> float | None:
    return None if end is None else max(LEAST_S, (end - time.monotonic()) / left)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    if not shown:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # What a narrow terminal has no room for is the end of the text, not the count and the time.
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = ("measuring", BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), text)
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
) -> list[Explanation]:
    """Measure problems by all ranks of a mesh; a collective, with the same arguments on every rank.

    Args:
        problems: those with `ranks` 1 are dealt out, and ranks that share a processor take turns; those with as many
            ranks as the mesh are measured jointly, their tokens dealt out evenly.
        mesh: as `attend` takes it.
        kind: of the shards, "contiguous" or "zigzag".
        budget_s: seconds for a rank's share of the first, and again for all of the others; None for no limit.
        force: measure again what is decided already.
        progress: show a bar on stderr, on the first rank alone.
        report: called on every rank with each problem's index and explanation when all are known.

    Returns:
        One explanation for each problem, on every rank.

    Raises:
        InvalidInput: a problem is for another number of ranks. RankLost: a rank is gone.
    """
    link = link_of(mesh)
    for problem in problems:
        if problem.ranks not in (1, link.size):
            raise InvalidInput(f"the mesh has {link.size} ranks, and this problem is for {problem.ranks}: {problem}")
    found = _dealt_out(problems, link, budget_s, force, progress)
    together = [index for index, problem in enumerate(problems) if problem.ranks > 1]
    for number, index in enumerate(together):
        each_s = None if budget_s is None else max(LEAST_S, budget_s / (len(together) - number))
        start = time.monotonic()
        found[index] = _together(problems[index], link, kind, each_s, force)
        budget_s = None if budget_s is None else budget_s - (time.monotonic() - start)
    for index in sorted(found) if report is not None else ():
        assert report is not None
        report(index, found[index])
    return [found[index] for index in range(len(problems))]


def _dealt_out(problems: Sequence[Problem], link: Link, budget_s: float | None, force: bool, progress: bool) -> Found:
    """Every rank measures its share of those of one device, and hears what the others found."""
    alone = [index for index, problem in enumerate(problems) if problem.ranks == 1]
    mine = alone[link.rank :: link.size]
    hosts = link.objects((link.host, problems[0].device.type if problems else "cpu"))
    turns = [hosts[:rank].count(hosts[rank]) if hosts[rank][1] == "cpu" else 0 for rank in range(link.size)]
    done: list[Explanation] = []
    for turn in range(max(turns) + 1):
        if turn == turns[link.rank] and mine:
            shown = progress and link.rank == 0
            done = profile([problems[index] for index in mine], budget_s=budget_s, force=force, progress=shown)
        link.barrier()  # two that measured at once on one processor would measure one another
    decisions = [look_up.read(Request.of(problems[index])) for index in mine]
    said = link.objects(
        [(index, each, kept and encode(kept)) for index, each, kept in zip(mine, done, decisions, strict=True)]
    )
    found: Found = {}
    for rank, share in enumerate(said):
        for index, explanation, kept in share:
            found[index] = explanation
            if kept and rank != link.rank:
                Store(cache_folder()).put(decode(kept))
    return found


def _together(problem: Problem, link: Link, kind: str, budget_s: float | None, force: bool) -> Explanation:
    layout = Layout(deal(problem.q_len, link.size), kind)
    sharded = ShardedProblem(problem, layout, link)
    generator = torch.Generator().manual_seed(link.rank)

    def made(heads: int) -> Tensor:
        shape = problem.batch, layout.lengths[link.rank], heads, problem.head_dim
        drawn = torch.randn(shape, generator=generator).to(problem.device, problem.dtype)
        return drawn.requires_grad_(problem.needs_grad)

    q, k, v = made(problem.heads), made(problem.kv_heads), made(problem.kv_heads)
    masks: dict[str, Tensor] = {}
    if problem.has_seq_lens:
        masks["seq_lens"] = torch.full((problem.batch,), problem.q_len, device=problem.device)
    if problem.has_key_mask:
        masks["key_mask"] = torch.ones(q.shape[:2], dtype=torch.bool, device=problem.device)
    budget_ms = None if budget_s is None else budget_s * 1e3
    return Explanation.of(
        group_decision.decide_together(sharded, (q, k, v), masks, None, force=force, budget_ms=budget_ms)
    )
