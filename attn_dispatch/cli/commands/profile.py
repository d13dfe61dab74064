"""Measure every backend that can run a problem, choose the fastest and store the decision for later runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch import settings
from attn_dispatch.cli import options, thresholds, urls
from attn_dispatch.cli.tables import full_table, no_backend, print_json, refused_by_all
from attn_dispatch.decisions.explanation import cuda_only, needs_cuda
from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.learning.speedups import SpeedupSeries, family_of, family_title
from attn_dispatch.learning.thresholds import MIN_LENGTHS
from attn_dispatch.ring.rows.layout import KINDS
from attn_dispatch.store.folder import Store
from attn_dispatch.text import folded, printable

if TYPE_CHECKING:
    from attn_dispatch.decisions.explanation import Explanation
    from attn_dispatch.spec.problem import Problem

EXAMPLE = """examples:
  attn-dispatch profile --quick
      a few problems of every kind, in under a minute
  attn-dispatch profile --lengths 1k:32k --causal both --backward
      causal and not, at 1024, 2048, .. 32768 tokens, as in training
  attn-dispatch profile --shape 2,16k,16/4,128 --segments 2k,4k,8k --dilations 1,2,4 --causal
      dilated attention with grouped heads
  attn-dispatch profile --grid 64,64 --window 7
      a 7 x 7 neighborhood
  attn-dispatch profile --thresholds --grid 64,64 --window 13 --lengths 1k:64k --budget 300
      the same on grids of about 1024, 2048, .. 65536 tokens: the length above which another token order is faster
  torchrun --nproc_per_node=4 -m attn_dispatch profile --lengths 32k:256k --sharded zigzag --causal
      sequences sharded over 4 ranks; without --sharded, each problem is measured on one of the ranks
  attn-dispatch profile --standard --share FILE
      what a profile for all machines of this kind needs, in about 20 minutes; CONTRIBUTING.md says where to send it
  attn-dispatch profile --from problems.jsonl
      the problems that attn_dispatch.record("problems.jsonl") wrote in a run; most of the budget goes to those that
      took most of its time

Ctrl-C prints the decisions so far; they stay stored."""

QUICK_S = 40.0  #: seconds for all default problems; loading torch and checking results are not included
QUICK_EACH_S = 2.0  #: seconds per problem with --quick
EACH_S = 10.0  #: seconds per problem
STANDARD_S = 1200.0  #: seconds for all problems of --standard
DEFAULT_LENGTHS = "1k:64k"  #: default --lengths of --thresholds


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_options(parser)
    effort = parser.add_mutually_exclusive_group()
    quick = "spend 2 s per problem; without problem options: a few problems of every kind, in under a minute"
    effort.add_argument("--quick", action="store_true", help=quick)
    full = "spend as long as it takes; without problem options: the problems of --quick"
    effort.add_argument("--full", action="store_true", help=full)
    standard = (
        "the problems of a profile for other machines: every kind of pattern, a length of each octave, each dtype"
    )
    effort.add_argument("--standard", action="store_true", help=f"{standard}, both directions; in about 20 minutes")
    thresholds_help = (
        "find the length above which another token order is faster: measures each problem at --lengths, by default "
        f"{DEFAULT_LENGTHS}, shortest first, so that longer ones get the rest of the budget"
    )
    parser.add_argument("--thresholds", action="store_true", help=thresholds_help)
    budget = "for all problems together; by default 10 s per problem"
    parser.add_argument("--budget", metavar="SECONDS", type=_seconds, help=budget)
    parser.add_argument(
        "--from", dest="record", metavar="RECORD", help="measure the problems in a file that record() wrote"
    )
    blocks = (
        "first race the block sizes of Triton's kernels for these problems, some minutes for each dtype and head_dim"
    )
    parser.add_argument("--blocks", action="store_true", help=f"{blocks}; --full does so on a CUDA device")
    sharded = "under torchrun: shard each problem's sequence over all ranks, in contiguous or zigzag chunks"
    parser.add_argument("--sharded", choices=KINDS, help=sharded)
    parser.add_argument("--force", action="store_true", help="measure again problems that have a decision")
    share = "then write this device's settled decisions for others, without paths or names; alone, measures nothing"
    parser.add_argument("--share", metavar="FILE", type=urls.target, help=share)
    verbose = "with several problems: list every backend in each table, also those that can run none of the problems"
    parser.add_argument("--verbose", action="store_true", help=verbose)


def run(args: argparse.Namespace) -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.sharded and ranks == 1:
        raise InvalidInput("--sharded needs ranks: torchrun --nproc_per_node=N -m attn_dispatch profile ...")
    if args.blocks and ranks > 1:
        raise InvalidInput("--blocks races on one device: run it once without torchrun; all ranks then use the result")
    if args.share and ranks > 1:
        raise InvalidInput("--share writes the decisions of one process: leave it, or run without torchrun")
    problems = [] if _only_shares(args) else _problems(args)
    explanations: list[Explanation] = []
    interrupted = False
    budget_s = _budget(args, len(problems))
    try:
        if ranks > 1:
            problems = _measured_by_ranks(args, problems, ranks, budget_s, explanations)
        elif problems:
            _measured(args, problems, budget_s, explanations)
    except KeyboardInterrupt:
        interrupted = True
    folders, unstored = _folders(problems, explanations), Store(settings.cache_folder()).why_unstored()
    if explanations and not folders:
        unstored = unstored or "no decision was measured"
    if ranks > 1 and os.environ.get("RANK", "0") != "0":
        return 1 if interrupted or unstored else 0  # only rank 0 prints
    if interrupted:
        done = f"{len(explanations)} of {len(problems)} problems are decided"
        print(f"interrupted: {done}; run the same command to measure the rest", file=sys.stderr)
    series = _series(problems) if args.thresholds else None
    shared = _share(args) if args.share and args.json else None
    with redirect_stdout(urls.beside(args.share or "")):
        if args.json:
            _print_json(explanations, interrupted, unstored, series, shared)
        else:
            _print_tables(explanations, args.verbose)
            if explanations:
                print(_summary(explanations, folders, unstored))
            if series is not None:
                print("", *thresholds.lines(series), sep="\n")
            if args.share:
                _print_shared(args)
    return 1 if interrupted or unstored or any(explanation.choice is None for explanation in explanations) else 0


def _print_shared(args: argparse.Namespace) -> None:
    shared = _share(args)
    print(f"{shared['decisions']} decisions of {shared['silicon']} written to {args.share}")
    for why, count in shared["left_out"].items():
        print(f"left out  {count}: {why}")


def _measured(
    args: argparse.Namespace, problems: list[Problem], budget_s: float | None, explanations: list[Explanation]
) -> None:
    from attn_dispatch.profiling import profile  # here, so that usage errors do not wait for torch

    changed = _race_blocks(problems, args.force) if args.blocks or args.full else False
    profile(
        problems,
        budget_s=budget_s,
        force=args.force or changed,
        report=lambda _, explanation: explanations.append(explanation),
        weights=_weights(args, problems),
    )


def _race_blocks(problems: list[Problem], force: bool) -> bool:
    """Race the blocks of the problems on CUDA; whether decisions of the table's blocks are to be measured again."""
    from attn_dispatch.decisions.block_race import race_blocks

    def report(outcome: object) -> None:
        print(outcome, file=sys.stderr)

    there = [problem for problem in problems if problem.device.type == "cuda"]
    return any(outcome.changed for outcome in race_blocks(there, force=force, report=report))


def _measured_by_ranks(
    args: argparse.Namespace,
    problems: list[Problem],
    ranks: int,
    budget_s: float | None,
    explanations: list[Explanation],
) -> list[Problem]:
    """Measure the problems and return them, with `ranks` set where they are sharded."""
    from attn_dispatch.profiling import profile_over
    from attn_dispatch.ring.link import world

    weights = _weights(args, problems)
    if args.sharded:
        problems = [replace(problem, ranks=ranks) for problem in problems]
    with world(problems[0].device.type):
        profile_over(
            problems,
            kind=args.sharded or KINDS[0],
            budget_s=budget_s,
            force=args.force,
            report=lambda _, explanation: explanations.append(explanation),
            weights=weights,
        )
    return problems


def _weights(args: argparse.Namespace, problems: list[Problem]) -> list[float] | None:
    return None if args.record is None else [args.weights[problem] for problem in problems]


def _only_shares(args: argparse.Namespace) -> bool:
    effort = args.quick or args.full or args.standard or args.budget is not None or args.force
    named = args.thresholds or args.record is not None or options.given(args)
    return bool(args.share) and not effort and not named


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
    try:
        urls.write(args.share, write_bundle(decisions))
    except urls.Unreachable as error:
        raise AttnDispatchError(f"--share {args.share}: cannot be written ({error})") from error
    return {"place": args.share, "silicon": here, "decisions": len(decisions), "left_out": left_out}


def _problems(args: argparse.Namespace) -> list[Problem]:
    if args.standard:
        if options.given(args) or args.record is not None or args.thresholds:
            raise InvalidInput("--standard names the problems: remove --from, --thresholds and options of problems")
        from attn_dispatch.spec.shapes import standard_problems

        return standard_problems(options.device_of(args))
    if args.thresholds:
        return _at_lengths(args)
    used = options.given(args)
    if args.record is not None:
        if used:
            raise InvalidInput(f"--from reads the problems from a file: remove {', '.join(used)}")
        return _recorded(args)
    if (args.quick or args.full) and not used:
        from attn_dispatch.spec.shapes import quick_problems

        return quick_problems(options.device_of(args))
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
        raise InvalidInput(
            "--thresholds needs a pattern with another token order: --grid H,W with --window, or --segments with "
            "--dilations"
        )
    args.lengths = args.lengths or options.lengths(DEFAULT_LENGTHS)
    found = sorted(options.problems_of(args), key=lambda problem: problem.q_len)
    if len({problem.q_len for problem in found}) < MIN_LENGTHS:
        raise InvalidInput(f"--thresholds needs at least {MIN_LENGTHS} lengths, such as --lengths {DEFAULT_LENGTHS}")
    return found


def _recorded(args: argparse.Namespace) -> list[Problem]:
    """The recorded problems, those first that took most time; `args.weights` then has that of each."""
    from attn_dispatch.machine.devices import resolve
    from attn_dispatch.profiling import weights_of_uses
    from attn_dispatch.store.problem_files import read_record

    path, device = args.record, args.device
    try:
        uses = read_record(path, None if device is None else resolve(device))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--from {path}: cannot be read ({error})") from error
    if not uses:
        raise InvalidInput(f"--from {path}: contains no problem")
    args.weights = dict(zip(uses, weights_of_uses(uses)))
    return sorted(uses, key=lambda problem: -args.weights[problem])


def _budget(args: argparse.Namespace, count: int) -> float | None:
    if args.budget is not None:
        return float(args.budget)
    if args.full:
        return None
    if args.standard:
        return STANDARD_S
    if args.quick and args.record is None and not options.given(args):
        return QUICK_S
    return count * (QUICK_EACH_S if args.quick else EACH_S)


def _seconds(text: str) -> float:
    return options.positive(text, "a number of seconds")


def _series(problems: Sequence[Problem]) -> list[SpeedupSeries]:
    """The stored series of these problems' families: of these lengths, and of those measured before."""
    families = sorted(set(map(_family, problems)))
    found = thresholds.of_groups(settings.cache_folder(), (family[:2] for family in families))
    return [each for each in found if (each.silicon, each.group, family_title(each.family)) in families]


def _family(problem: Problem) -> tuple[str, str, str]:
    from attn_dispatch.machine.hardware import silicon
    from attn_dispatch.spec.groups import group_of

    plain = problem.to_dict()
    return silicon(problem.device), group_of(plain), family_title(family_of(plain))


def _print_json(
    explanations: Sequence[Explanation],
    interrupted: bool,
    unstored: str,
    series: Sequence[SpeedupSeries] | None,
    shared: dict[str, Any] | None,
) -> None:
    decisions = [explanation.to_dict() for explanation in explanations]
    extra: dict[str, Any] = {} if series is None else {"thresholds": thresholds.to_dicts(series)}
    extra |= {} if shared is None else {"shared": shared}
    about = {"folder": str(settings.cache_folder()), "interrupted": interrupted, "unstored": unstored or None}
    print_json({"decisions": decisions, **about, **extra})


def _print_tables(explanations: Sequence[Explanation], verbose: bool) -> None:
    if len(explanations) == 1:
        print(explanations[0], end="\n\n")
    else:
        for device in dict.fromkeys(explanation.device for explanation in explanations):
            here = [explanation for explanation in explanations if explanation.device == device]
            refused = {} if verbose else refused_by_all(here)
            print(printable(f"device    {device}"), "", sep="\n")
            if refused:
                elsewhere = [name for name, reason in refused.items() if needs_cuda(reason)]
                rest = [folded(printable(f"  {each}: {refused[each]}")) for each in refused if each not in elsewhere]
                print("can run none of these problems (--verbose lists them in each table):", *rest, sep="\n")
                print(*(f"  {line}" for line in cuda_only(elsewhere)), "", sep="\n")
            print(*full_table(here, but=refused), "", sep="\n")
        for explanation in explanations:
            if explanation.choice is None:
                print(*no_backend(explanation), "", sep="\n")


def _summary(explanations: Sequence[Explanation], folders: Sequence[Path], unstored: str) -> str:
    """How many problems are decided, provisionally or not at all, and where that is stored."""
    failed = sum(each.choice is None or each.source in ("learned", "heuristic") for each in explanations)
    provisional, count = sum(bool(each.provisional) for each in explanations), len(explanations)
    again = " (run it again while nothing else runs)" * (provisional > 0)
    counts = f"{count - provisional - failed} decided, {provisional} provisional{again}, {failed} failed"
    places = [f"stored in {folder}" for folder in folders]
    places += [f"{'not all' if folders else 'nothing'} is stored: {unstored}"] if unstored else []
    return "; ".join([f"{count} problem{'s' * (count != 1)}: {counts}", *places])


def _folders(problems: Sequence[Problem], explanations: Sequence[Explanation]) -> list[Path]:
    """The folders in which these decisions are stored."""
    from attn_dispatch.machine.hardware import silicon
    from attn_dispatch.spec.groups import group_of

    store = Store(settings.cache_folder())
    paths: list[Path] = []
    for problem, each in zip(problems, explanations):
        group = group_of(problem.to_dict())
        if problem.ranks == 1:
            paths.append(store.path(silicon(problem.device), group, each.key))
        else:  # under the fingerprint of all ranks' machines
            paths += store.root.glob(f"*/{group}/{each.key}.json")
    return list(dict.fromkeys(path.parent.parent for path in paths if path.is_file()))
