"""Measure every backend that can run a problem, choose the fastest and store the decision for later runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_dispatch import settings
from attn_dispatch.cli import options, thresholds, urls
from attn_dispatch.cli.tables import HEAD, Table, cells, print_json
from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.learning.thresholds import MIN_LENGTHS
from attn_dispatch.ring.rows.layout import KINDS
from attn_dispatch.store.folder import Store
from attn_dispatch.text import printable

if TYPE_CHECKING:
    from attn_dispatch.decisions.explanation import Explanation
    from attn_dispatch.spec.problem import Problem
    from attn_dispatch.store.decision import Decision

EXAMPLE = """examples:
  attn-dispatch profile --quick
  attn-dispatch profile --lengths 1k:32k --causal both --backward
      causal and not, at 1024, 2048, .. 32768 tokens, as in training
  attn-dispatch profile --thresholds --grid 64,64 --window 13 --lengths 1k:64k --budget 300
      13 x 13 neighborhoods on grids of about 1024, 2048, .. 65536 tokens
  attn-dispatch profile --thresholds --blocks 64 --shape 1,8k,8,64 --backward both
      masks that name blocks of 64 tokens, at densities from 1/90 to 1
  torchrun --nproc_per_node=4 -m attn_dispatch profile --lengths 32k:256k --sharded zigzag --causal
      over 4 ranks; without --sharded, each problem on one of them
  attn-dispatch profile --from problems.jsonl
      those that record("problems.jsonl") wrote in a run

Ctrl-C prints the decisions so far; they stay stored."""

QUICK_S = 40.0  #: seconds for all default problems; loading torch and checking results are not included
QUICK_EACH_S = 2.0  #: seconds per problem with --quick
EACH_S = 10.0  #: seconds per problem
STANDARD_S = 1200.0  #: seconds for all problems of --standard
DENSITIES = (0, -2, -3, -5, -7, -10, -13)  #: of --blocks, in half octaves: 1 to 1 in 90
DEFAULT_LENGTHS = "1k:64k"  #: default --lengths of --thresholds


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_options(parser)
    effort = parser.add_mutually_exclusive_group()
    quick = "spend 2 s per problem; without problem options: a few problems of every kind, in under a minute"
    full = "the same, for as long as it takes"
    standard = "for a profile of such machines: every pattern, octave of lengths, dtype and direction; 20 minutes"
    for name, text in (("--quick", quick), ("--full", full), ("--standard", standard)):
        effort.add_argument(name, action="store_true", help=text)
    add = parser.add_argument
    lengths = f"measures at --lengths, by default {DEFAULT_LENGTHS}, shortest first"
    above = "find the length above which another token order is faster"
    add("--thresholds", action="store_true", help=f"{above}: {lengths}")
    named = "masks made of blocks of Q queries and K keys"
    blocks = (
        f"with --thresholds, in place of lengths: find the density below which skipping what is hidden pays, of {named}"
    )
    add("--blocks", metavar="Q,K", type=options.counts, help=blocks)
    budget = "for all problems together; by default 10 s per problem"
    add("--budget", metavar="SECONDS", type=options.positive, help=budget)
    add("--from", dest="record", metavar="RECORD", help="measure the problems in a file that record() wrote")
    sharded = "under torchrun: shard each problem's sequence over all ranks, in contiguous or zigzag chunks"
    add("--sharded", choices=KINDS, help=sharded)
    add("--force", action="store_true", help="measure again problems that have a decision")
    share = "then write this device's decisions for others, without paths or names; alone, measures nothing"
    add("--share", metavar="FILE", type=urls.target, help=share)
    add("--verbose", action="store_true", help="print every decision with all candidates")


def run(args: argparse.Namespace) -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.sharded and ranks == 1:
        raise InvalidInput("--sharded needs ranks: torchrun --nproc_per_node=N -m attn_dispatch profile ...")
    if args.share and ranks > 1:
        raise InvalidInput("--share writes the decisions of one process: leave it, or run without torchrun")
    problems = _problems(args)
    if args.sharded:
        problems = [replace(problem, ranks=ranks) for problem in problems]
    found: list[Explanation] = []
    interrupted = False
    try:
        if problems:
            _measure(args, problems, ranks, found)
    except KeyboardInterrupt:
        interrupted = True
    unstored = Store(settings.cache_folder()).why_unstored()
    if found and all(each.choice is None for each in found):
        unstored = unstored or "no decision was measured"
    if ranks > 1 and os.environ.get("RANK", "0") != "0":
        return 1 if interrupted or unstored else 0  # only rank 0 prints
    if interrupted:
        done = f"{len(found)} of {len(problems)} problems are decided"
        print(f"interrupted: {done}; run the same command to measure the rest", file=sys.stderr)
    with urls.beside(args.share or ""):
        series = _series(problems) if args.thresholds else None
        if args.json:
            made: dict[str, Any] = {"decisions": [each.to_dict() for each in found], "interrupted": interrupted}
            made |= {"folder": str(settings.cache_folder()), "unstored": unstored or None}
            made |= {} if series is None else thresholds.to_dicts(series)
            print_json(made | ({"shared": _share(args)} if args.share else {}))
        else:
            _print(args, found, unstored, series)
    return 1 if interrupted or unstored or any(each.choice is None for each in found) else 0


def _measure(args: argparse.Namespace, problems: list[Problem], ranks: int, found: list[Explanation]) -> None:
    """Measure the problems; what is decided is added to `found`."""
    from attn_dispatch.profiling import profile, profile_over  # here, so that usage errors do not wait for torch
    from attn_dispatch.ring.link import world

    how: dict[str, Any] = {
        "budget_s": _budget(args, len(problems)),
        "force": args.force,
        "report": lambda _, explanation: found.append(explanation),
        "weights": getattr(args, "weights", None),
    }
    if ranks == 1:
        profile(problems, **how)
        return
    with world(problems[0].device.type):
        profile_over(problems, kind=args.sharded or KINDS[0], **how)


def _share(args: argparse.Namespace) -> dict[str, Any]:
    """Write the decisions of the device that others may use; what was written, for the output."""
    from attn_dispatch.kernels.registry import BUILT_IN, LAST_RESORT
    from attn_dispatch.machine.hardware import silicon
    from attn_dispatch.store.bundle import shareable, write_bundle

    here = silicon(options.device_of(args))
    mine = [each for _, each in Store(settings.cache_folder()).all() if each.silicon == here]
    decisions, left_out = shareable(mine, (*BUILT_IN, LAST_RESORT))
    if not decisions:
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none is stored"
        raise AttnDispatchError(f"no decision of {here} can be shared: {why}")
    urls.write(args.share, write_bundle(decisions))
    return {"place": args.share, "silicon": here, "decisions": len(decisions), "left_out": left_out}


def _problems(args: argparse.Namespace) -> list[Problem]:
    used = options.given(args)
    if args.standard:
        if used or args.record is not None or args.thresholds:
            raise InvalidInput("--standard names the problems: remove --from, --thresholds and options of problems")
        from attn_dispatch.spec.shapes import standard_problems

        return standard_problems(options.device_of(args))
    if args.blocks:
        return _at_densities(args)
    if args.thresholds:
        return _at_lengths(args)
    if args.record is not None:
        if used:
            raise InvalidInput(f"--from reads the problems from a file: remove {', '.join(used)}")
        return _recorded(args)
    if (args.quick or args.full) and not used:
        from attn_dispatch.spec.shapes import quick_problems

        return quick_problems(options.device_of(args))
    if args.share and not used and args.budget is None and not args.force:
        return []  # alone, it writes what is stored
    if not options.has_length(args):
        raise InvalidInput(
            "give the problems to measure: --shape B,N,H,D, --lengths A:B, --grid H,W or --from RECORD; "
            "or --quick alone, for a few problems of every kind"
        )
    return options.problems_of(args)


def _at_lengths(args: argparse.Namespace) -> list[Problem]:
    """The problems of the options at every length, the shortest first."""
    if args.record is not None:
        raise InvalidInput("--thresholds takes its problems from --lengths: remove --from")
    if not (args.grid or args.segments):
        orders = "--grid H,W with --window, or --segments with --dilations"
        raise InvalidInput(f"--thresholds needs a pattern with another token order: {orders}")
    args.lengths = args.lengths or options.lengths(DEFAULT_LENGTHS)
    found = sorted(options.problems_of(args), key=lambda problem: problem.q_len)
    if len({problem.q_len for problem in found}) < MIN_LENGTHS:
        raise InvalidInput(f"--thresholds needs at least {MIN_LENGTHS} lengths, such as --lengths {DEFAULT_LENGTHS}")
    return found


def _at_densities(args: argparse.Namespace) -> list[Problem]:
    """The problems of the options, with tables of blocks of several densities."""
    if not args.thresholds or args.record is not None or args.segments or args.grid or len(args.blocks) > 2:
        wrong = "it takes one or two numbers, with --thresholds, and no --from, --segments or --grid"
        raise InvalidInput(f"--blocks {','.join(map(str, args.blocks))}: {wrong}")
    from attn_dispatch.spec.data import BlocksForm

    size, every = (args.blocks[0], args.blocks[-1]), options.problems_of(args)
    tables = (partial(BlocksForm, size, "all", False, False, each.pattern) for each in every)
    forms = [[table(density, imbalance=0) for density in DENSITIES] for table in tables]
    return [replace(each, pattern=form, given=form) for each, own in zip(every, forms) for form in own]


def _recorded(args: argparse.Namespace) -> list[Problem]:
    """The recorded problems; `args.weights` then has the time that each took."""
    from attn_dispatch.machine.devices import resolve
    from attn_dispatch.profiling import weights_of_uses
    from attn_dispatch.recording import read_record

    try:
        uses = read_record(args.record, None if args.device is None else resolve(args.device))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--from {args.record}: cannot be read ({error})") from error
    if not uses:
        raise InvalidInput(f"--from {args.record}: contains no problem")
    args.weights = weights_of_uses(uses)
    return list(uses)


def _budget(args: argparse.Namespace, count: int) -> float | None:
    budget: float | None = args.budget
    if budget is not None or args.full:
        return budget
    if args.standard:
        return STANDARD_S
    if args.quick and args.record is None and not options.given(args):
        return QUICK_S
    return count * (QUICK_EACH_S if args.quick else EACH_S)


def _series(problems: Sequence[Problem]) -> list[Decision]:
    """The stored decisions of these problems' devices: of these lengths, and of those measured before."""
    from attn_dispatch.machine.hardware import silicon

    here = {silicon(problem.device) for problem in problems}
    return [each for _, each in Store(settings.cache_folder()).all() if each.silicon in here]


def _print(
    args: argparse.Namespace, found: Sequence[Explanation], unstored: str, series: Sequence[Decision] | None
) -> None:
    """Print the decisions, the thresholds and what is shared, as far as they were asked for."""
    if len(found) == 1 or args.verbose:
        print(*found, sep="\n\n", end="\n\n" if found else "")
    else:
        _print_winners(found)
    if found:
        print(_summary(found, unstored))
    if series is not None:
        print("", *thresholds.lines(series), sep="\n")
    if args.share:
        shared = _share(args)
        print(f"{shared['decisions']} decisions of {shared['silicon']} written to {shared['place']}")
        print(*(f"left out  {count}: {why}\n" for why, count in shared["left_out"].items()), sep="", end="")


def _print_winners(found: Sequence[Explanation]) -> None:
    """A line for each decision, by device."""
    for device in dict.fromkeys(explanation.device for explanation in found):
        here = [explanation for explanation in found if explanation.device == device]
        rows = Table(HEAD, list(map(cells, here)), {0, 1, 4}).lines()
        print(printable(f"device    {device}"), "", *rows, "", sep="\n")
    for explanation in found:
        if explanation.choice is None:
            print(explanation, end="\n\n")


def _summary(explanations: Sequence[Explanation], unstored: str) -> str:
    """How many problems are decided, provisionally or not at all, and where that is stored."""
    failed = sum(each.choice is None or each.source in ("learned", "heuristic") for each in explanations)
    provisional, count = sum(bool(each.provisional) for each in explanations), len(explanations)
    again = " (run it again while nothing else runs)" if provisional else ""
    counts = f"{count - provisional - failed} decided, {provisional} provisional{again}, {failed} failed"
    stored = f"not stored: {unstored}" if unstored else f"stored in {settings.cache_folder()}"
    return f"{count} problem{'s' if count != 1 else ''}: {counts}; {stored}"
