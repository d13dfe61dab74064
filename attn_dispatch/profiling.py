"""Measure problems now, so that no later call has to."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from attn_dispatch import dispatch
from attn_dispatch.decisions import decide, look_up
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.errors import InvalidInput
from attn_dispatch.recording import read_record
from attn_dispatch.settings import mode
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem

LEAST_S = 0.05  #: seconds that a problem gets however little of the budget is left

Report = Callable[[int, Explanation], None]


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


def quick_problems(device: torch.device) -> list[Problem]:
    """A few problems of each kind, of a size that this device does in well under a second each."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    lengths = (2048, 8192, 32768) if gpu else (512, 2048, 4096)
    patterns: list[Pattern] = [
        Dense(),
        Dense(is_causal=True),
        Window(left=255, right=0),
        Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True),
    ]
    plain = [problem_of((1, n, 8, 64), p, dtype, device) for p in patterns for n in lengths]
    rows = 64 if gpu else 32
    grid = problem_of((1, rows * 32, 8, 64), Neighborhood((rows, 32), (13, 13)), dtype, device)
    training = problem_of((1, lengths[1], 8, 64), patterns[3], dtype, device)
    return [*plain, grid, replace(training, needs_grad=True)]


def problem_of(
    shape: tuple[int, int, int, int],
    pattern: Pattern,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_heads: int | None = None,
    backward: bool = False,
) -> Problem:
    """The problem of contiguous q, k and v of one shape [batch, len, heads, head_dim].

    Args:
        kv_heads: of k and v; as many as q has by default.
        backward: whether gradients are needed.

    Raises:
        InvalidInput: the shape is not positive or past what a tensor can be, or the pattern does not fit it.
    """
    batch, length, heads, head_dim = shape
    kv_heads = heads if kv_heads is None else kv_heads
    if min(*shape, kv_heads) < 1:
        raise InvalidInput(f"shape and kv_heads must be integers >= 1, got {shape} and {kv_heads}")
    try:
        q, kv = (
            torch.empty(batch, length, count, head_dim, dtype=dtype, device="meta", requires_grad=backward)
            for count in (heads, kv_heads)
        )
    except RuntimeError as error:
        raise InvalidInput(f"shape {shape}: {error}") from error
    with torch.enable_grad():
        return Problem.of(q, kv, kv, pattern, device=device)


def _settle(problem: Problem, share_s: float | None, force: bool) -> Explanation:
    """What holds is left alone, unless live calls told otherwise; what changed is measured by itself."""
    with decide.lock:  # another thread may meet the same problem
        return _settle_alone(problem, share_s, force)


def _settle_alone(problem: Problem, share_s: float | None, force: bool) -> Explanation:
    budget_ms = math.inf if share_s is None else share_s * 1e3
    kept = look_up.look_up(problem, budget_ms)
    if kept is not None and kept.holds and kept.decision.drift is None and not force:
        return Explanation.of(kept.decision)
    if kept is not None and (force or kept.decision.drift is not None):
        kept = look_up.Found(kept.decision, kept.choice)  # all of it
    decision = decide.measure(problem, share_s, kept)
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
