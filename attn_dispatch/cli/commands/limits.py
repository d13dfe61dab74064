"""Find the longest sequence that fits. Each length is tried in a process of its own that can take no more memory than
--memory, and never more than 80 % of what is free. Stores no decisions.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from attn_dispatch.cli import options
from attn_dispatch.cli.tables import Table, compact, print_json
from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.text import gib, milliseconds, one_line, printable

if TYPE_CHECKING:
    import torch

    from attn_dispatch.cli.longest import Search, Tried
    from attn_dispatch.spec.problem import Problem

EXAMPLE = """examples:
  attn-dispatch limits --segments 2k,4k,8k --dilations 1,2,4 --dtype bf16
  attn-dispatch limits --shape 1,8k,16/4,128 --causal --backward --backend all --memory 8GiB
      a training step, as on a device of 8 GiB; a row for each backend

Ctrl-C prints what was found."""

START = 1024  #: tokens, without --shape, --lengths and --grid
LONGEST = 2**40  #: tokens
HEAD = ("backend", "longest", "peak memory", "besides tensors", "time", "tokens/s", "by estimate", "did not run", "why")
LEFT = {0, 8}
EXPLAINED = (
    "longest: to 1/8; peak memory: q, k, v and results included, besides tensors: the rest of it; by estimate: the",
    "longest whose declared memory fits; did not run: the shortest tried above the longest",
)
GUESSED = "not measured yet: the first call of attend() measures, and may take another backend"


def configure(parser: argparse.ArgumentParser) -> None:
    upward = "The search goes upward from N of --shape, by default 1024, or from least to largest of --lengths."
    options.add_options(parser, upward)
    add = parser.add_argument
    backend = "this one, or 'all' for a row each; by default what attend() takes at each length without measuring"
    add("--backend", metavar="NAME", help=backend)
    memory = "for q, k, v, results and workspace together, such as 8GiB; by default and at most 80 %% of the free"
    add("--memory", metavar="SIZE", type=options.size, help=memory)
    seconds = "of one call: lengths that would take longer are not tried; by default %(default)g"
    add("--max-seconds", metavar="S", type=options.positive, default=60.0, help=seconds)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from attn_dispatch.cli.longest import Tried

    device = options.device_of(args)
    memory_bytes = _memory(args, device)
    begun: list[Search] = []
    interrupted, failed = False, None
    try:
        with Console(stderr=True).status("") as status:

            def report(each: str | Tried) -> None:
                if isinstance(each, Tried):
                    status.console.print(printable(_progress(each)), markup=False, highlight=False, soft_wrap=True)
                else:
                    status.update(f"trying {each}")

            for search in _searches(args, memory_bytes, report):
                begun.append(search)
                search.run()
    except (KeyboardInterrupt, AttnDispatchError, OSError, RuntimeError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        failed = None if interrupted else one_line(error)
        if failed is not None and not any(each.tried for each in begun):
            raise
        print(f"attn-dispatch limits: {failed or 'interrupted'}; what was found so far follows", file=sys.stderr)
    if args.json:
        found = {"device": str(device), "memory_bytes": memory_bytes, "max_seconds": args.max_seconds}
        print_json(found | {"interrupted": interrupted, "error": failed, "limits": list(map(_to_dict, begun))})
    else:
        print(*map(printable, _lines(begun, device, memory_bytes)), sep="\n")
    return 1 if interrupted or failed is not None or any(each.longest is None for each in begun) else 0


def _searches(args: argparse.Namespace, memory_bytes: int, report: Callable[[str | Tried], None]) -> list[Search]:
    """A search for each combination of listed values and each backend; all are checked before the first runs."""
    from attn_dispatch.cli.longest import Search
    from attn_dispatch.kernels import registry

    found = []
    for each in _singles(args):
        start, most = math.prod(args.grid) if args.grid else each.shape[0].length, LONGEST
        if args.lengths:
            start, most = min(args.lengths), getattr(args.lengths, "last", max(args.lengths))
        limits = memory_bytes, args.max_seconds
        for name in registry.names() if args.backend == "all" else (args.backend,):
            found.append(Search(partial(_problem, each), start, most, name, *limits, report))
    return found


def _singles(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The options of each combination of the listed values."""
    shapes = args.shape or [None if args.grid else options.DEFAULT._replace(length=START)]
    switches = [("no", "yes") if each == "both" else (each,) for each in (args.causal, args.backward)]
    for shape, dtype, causal, backward in product(shapes, args.dtype or [None], *switches):
        given = {"shape": shape and [shape], "dtype": dtype and [dtype], "causal": causal, "backward": backward}
        yield argparse.Namespace(**{**vars(args), **given})


def _problem(args: argparse.Namespace, tokens: int) -> Problem:
    (problem,) = options.problems_of(argparse.Namespace(**{**vars(args), "lengths": (tokens,)}))
    return problem


def _memory(args: argparse.Namespace, device: torch.device) -> int:
    from attn_dispatch.machine.memory import UNKNOWN, available_bytes
    from attn_dispatch.tuning.candidates import MEMORY_SHARE

    free = available_bytes(device)
    if free == UNKNOWN and args.memory is None:
        raise InvalidInput(f"--memory must be given for {device}, which does not tell how much is free")
    most = int(MEMORY_SHARE * free)
    if args.memory is not None and args.memory > most:
        share = f"{MEMORY_SHARE:.0%} of the {gib(free)} free on {device}"
        raise InvalidInput(f"--memory may be {gib(most)} at most, {share}, got {gib(args.memory)}")
    return most if args.memory is None else int(args.memory)


def _progress(tried: Tried) -> str:
    start = f"{tried.tokens:,} tokens" + (f" with {tried.backend}" if tried.backend else "")
    if tried.seconds is None:
        return f"{start}: {tried.reason}"
    return f"{start}: {milliseconds(tried.seconds * 1e3)}, memory {_bytes(tried.peak_bytes)}"


def _lines(searches: list[Search], device: torch.device, memory_bytes: int) -> list[str]:
    lines = iter(Table(HEAD, list(map(_cells, searches)), LEFT).lines())
    found = [f"device   {device}, {gib(memory_bytes)} at most", "", next(lines)]
    for title, group in groupby(searches, _title):
        found += ["", title, *(next(lines) for _ in group)]
    found += ["", *EXPLAINED]
    return [*found, GUESSED] if any(each.guessed for each in searches) else found


def _title(search: Search) -> str:
    """The problem, with N for its length."""
    problem = search.problem
    return compact(str(problem).replace(f"[{problem.batch}, {problem.q_len},", f"[{problem.batch}, N,", 1))


def _cells(search: Search) -> list[str]:
    best, failed = search.longest, search.stopped_by
    backend = next((each.backend for each in (best, failed) if each and each.backend), search.backend or "-")
    cells = [backend, *"-" * 5]
    if best is not None and best.seconds is not None:
        times = [milliseconds(best.seconds * 1e3), f"{_speed(search, best):,.0f}"]
        cells = [backend, f"{best.tokens:,}", _bytes(best.peak_bytes), _bytes(best.above_bytes), *times]
    cells.append("-" if search.estimate is None else f"{search.estimate:,}")
    if failed is None:
        return [*cells, "-", "the longest that was asked for" if search.complete else "not finished"]
    by_other = "" if failed.backend in ("", backend) else f"{failed.backend}: "
    return [*cells, f"{failed.tokens:,}", by_other + failed.reason]


def _bytes(count: int | None) -> str:
    return "-" if count is None else gib(count)


def _speed(search: Search, tried: Tried) -> float:
    """Tokens per second."""
    return search.problem.batch * tried.tokens / (tried.seconds or math.inf)


def _to_dict(search: Search) -> dict[str, Any]:
    best, failed = search.longest, search.stopped_by
    return {
        "problem": search.problem.to_dict(),
        "title": _title(search),
        "forced": search.backend,
        "complete": search.complete,
        "guessed": search.guessed,
        "estimate_tokens": search.estimate,
        "longest": None if best is None else {**asdict(best), "tokens_per_s": _speed(search, best)},
        "stopped_by": None if failed is None else asdict(failed),
        "tried": [asdict(each) for each in search.tried],
    }
