"""`profile` by many ranks: problems of one device are dealt out, those of a mesh are measured together.

Every rank ends up with every decision, whether or not they share a cache folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.decisions import look_up
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.profiling import LEAST_S, Report, profile
from attn_dispatch.ring import group_decision
from attn_dispatch.ring.link import Link, link_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, Layout, deal
from attn_dispatch.ring.sharded_problem import Shared
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import decode, encode
from attn_dispatch.store.folder import Store, cache_folder

Found = dict[int, Explanation]


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
    decisions = [look_up.read(problems[index]) for index in mine]
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
    shared = Shared(problem, layout, link, attend)
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
    return Explanation.of(group_decision.decide(shared, (q, k, v), masks, None, force=force, budget_ms=budget_ms))
