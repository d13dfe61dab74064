"""Predict what attention over a sequence on many ranks takes, for each way of exchanging rows: memory, bytes shipped,
time. Counts, measures nothing and runs nothing: any number of ranks will do, here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_dispatch.cli import options
from attn_dispatch.cli.tables import print_json
from attn_dispatch.errors import InvalidInput
from attn_dispatch.text import align, gib, milliseconds, printable

if TYPE_CHECKING:
    from attn_dispatch.ring.plan.forecast import Forecast
    from attn_dispatch.ring.plan.rates import Rate
    from attn_dispatch.spec.problem import Problem

EXAMPLE = """examples:
  attn-dispatch plan --tokens 512M --ranks 64 --segments 2k,64M --dilations 1,32k --dtype bf16 --link 50 --rate 200
      half a billion tokens over 64 ranks that ship 50 GB/s each way and do 200 TFLOP/s each
  attn-dispatch plan --tokens 1M --ranks 1,2,4,8 --causal --layout zigzag --backward --link 10
      a training step on more and more ranks, at the rate that was measured on this machine"""

KINDS = ("contiguous", "zigzag")
HEAD = ("ranks", "exchange", "memory", "buffers", "sends", "all send", "time", "tokens/s", "speed-up", "verdict")
LEFT = {1, 9}
EXPLAINED = (
    "predicted, not measured: operations over rate, bytes over link, overlapped as the engine does; no latency; parts",
    "that are worked on by position are taken to be as fast as the rest",
    "memory: peak of the rank that takes most, q, k, v and results included; sends: bytes of the rank that sends most",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", metavar="N", type=options.count, help="of the whole sequence; may end in k or M: 1M is 1048576")
    add("--ranks", metavar="P,..", type=options.lengths, required=True,
        help="that share it; A:B doubles from A up to B")  # fmt: skip
    add("--link", metavar="GB/s", type=_positive, required=True, help="each rank's, each way; a GB is 10**9 bytes")
    add("--rate", metavar="TFLOP/s", type=_positive,
        help="each rank's, on query-key pairs of the pattern; by default that of the fastest backend in the nearest "
        "decision kept on this machine")  # fmt: skip
    add("--heads", metavar="H", type=options.count, default=options.USUAL.heads, help="of q; by default %(default)s")
    add("--kv-heads", metavar="H", type=options.count, help="of k and v; by default as many as q has")
    add("--head-dim", metavar="D", type=options.count, default=options.USUAL.head_dim, help="by default %(default)s")
    add("--batch", metavar="B", type=options.count, default=1, help="by default %(default)s")
    add("--dtype", metavar="T", type=options.dtypes, help="by default what 'attn-dispatch profile' takes")
    add("--device", metavar="D", help="what ranks are, of what is here; by default CUDA if there is some")
    layout = "one run of tokens for each rank, or an early and a late one, which shares out causal work evenly"
    add("--layout", choices=KINDS, default=KINDS[0], help=layout)
    add("--backward", dest="with_backward", action="store_true", help="forward and backward")
    add("--lse", action="store_true", help="lse is asked for, and in training has a gradient")
    add("--segments", metavar="W,..", type=options.counts, help="dilated attention: tokens per segment of each branch")
    add("--dilations", metavar="R,..", type=options.counts, help="dilated attention: dilation rate of each branch")
    add("--grid", metavar="H,W", type=options.counts, help="neighborhood attention: tokens per axis; sets --tokens")
    window = (
        "with --grid: width of the neighborhood; without: LEFT,RIGHT of a sliding window, 'none' for an open side; "
        "LEFT,RIGHT,SINKS adds the first keys"
    )
    add("--window", metavar="W,..", type=options.window, help=window)
    add("--causal", dest="is_causal", action="store_true", help="keys after the query are not seen")


class Plan(NamedTuple):
    """Of one number of ranks."""

    ranks: int
    lengths: tuple[int, ...]
    forecasts: list[Forecast]


def run(args: argparse.Namespace) -> int:
    problem = _problem(args)
    rate = _rate(args, problem)
    if rate is None:
        print(f"attn-dispatch plan: no time is predicted: {_no_rate(problem)}", file=sys.stderr)
    plans = _plans(args, problem, rate)
    if args.json:
        print_json(_plain(args, problem, rate, plans))
    else:
        print(*map(printable, _lines(args, problem, rate, plans)), sep="\n")
    return 0


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def _problem(args: argparse.Namespace) -> Problem:
    """The whole sequence's."""
    if (args.tokens is None) == (args.grid is None):
        raise InvalidInput("say how long the sequence is: --tokens N, or --grid H,W, not both")
    if args.dtype is not None and len(args.dtype) > 1:
        raise InvalidInput(f"--dtype takes one, got {', '.join(args.dtype)}")
    tokens = math.prod(args.grid) if args.tokens is None else args.tokens
    wanted = options.Shape(args.batch, tokens, args.heads, args.kv_heads or args.heads, args.head_dim)
    args.shape, args.lengths = [wanted], None
    args.causal, args.backward = "yes" if args.is_causal else None, "yes" if args.with_backward else None
    (problem,) = options.problems_of(args)
    from dataclasses import replace

    return replace(problem, return_lse=args.lse)


def _rate(args: argparse.Namespace, problem: Problem) -> Rate | None:
    from attn_dispatch.ring.plan.rates import Rate, rate_near

    if args.rate is not None:
        return Rate(args.rate * 1e12, "--rate")
    return rate_near(problem, -(-problem.q_len // max(args.ranks)))


def _no_rate(problem: Problem) -> str:
    shape = f"{problem.batch},8k,{problem.heads}/{problem.kv_heads},{problem.head_dim}"
    dtype = str(problem.dtype).removeprefix("torch.")
    what = f"nothing in {dtype} was measured here that is large enough: give --rate"
    return f"{what}, or measure with 'attn-dispatch profile --shape {shape} --dtype {dtype}'"


def _plans(args: argparse.Namespace, problem: Problem, rate: Rate | None) -> list[Plan]:
    from rich.console import Console

    from attn_dispatch.ring.plan.forecast import forecasts_over
    from attn_dispatch.ring.plan.schedule import Pace
    from attn_dispatch.ring.rows.layout import Layout, deal

    pace = None if rate is None else Pace(rate.operations, args.link * 1e9)
    found = []
    with Console(stderr=True).status("") as status:
        for ranks in args.ranks:
            status.update(f"counting over {ranks} ranks")
            lengths = deal(problem.q_len, ranks)
            found.append(Plan(ranks, lengths, forecasts_over(problem, Layout(lengths, args.layout), pace)))
    return found


def _best(plan: Plan) -> Forecast | None:
    timed = [each for each in plan.forecasts if each.seconds is not None]
    return min(timed, key=lambda each: each.seconds or 0.0, default=None)


# --- output -----------------------------------------------------------------------------------------------------------


def _lines(args: argparse.Namespace, problem: Problem, rate: Rate | None, plans: Sequence[Plan]) -> list[str]:
    shards = f"{args.layout} shards on {problem.device.type}, {args.link:g} GB/s each way"
    found = [f"problem   {problem}", f"shards    {shards}"]
    if rate is not None:
        found.append(f"rate      {rate.operations / 1e12:.3g} TFLOP/s for each rank ({rate.source})")
    rows = [_cells(problem, plan, each, plans[0]) for plan in plans for each in plan.forecasts]
    found += ["", *align([list(HEAD), *rows], LEFT), "", *EXPLAINED]
    most = max((each.memory.setup_bytes for plan in plans for each in plan.forecasts if each.memory), default=0)
    if most:
        found.append(f"first call: about {gib(most)} of each rank's host besides, to find out which rows go where")
    return found


def _cells(problem: Problem, plan: Plan, forecast: Forecast, first: Plan) -> list[str]:
    start = [str(plan.ranks), forecast.exchange]
    if forecast.memory is None:
        return [*start, *"-" * 7, f"no: {forecast.reason}"]
    memory, best, base = forecast.memory, _best(plan), _best(first)
    figures = [memory.peak_bytes, memory.buffer_bytes, forecast.shipped_bytes or 0, forecast.shipped_total_bytes or 0]
    times = ["-"] * 3
    if forecast.seconds and base is not None and base.seconds:
        speed = problem.batch * problem.q_len / forecast.seconds
        times = [milliseconds(forecast.seconds * 1e3), f"{speed:,.0f}", f"{base.seconds / forecast.seconds:.2f}x"]
    return [*start, *map(gib, figures), *times, "fastest" if forecast is best else ""]


def _plain(args: argparse.Namespace, problem: Problem, rate: Rate | None, plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "problem": problem.to_dict(),
        "title": " ".join(str(problem).split()),
        "layout": args.layout,
        "link_bytes_per_s": args.link * 1e9,
        "rate": None if rate is None else asdict(rate),
        "plans": [
            {
                "ranks": plan.ranks,
                "tokens": list(plan.lengths),
                "fastest": getattr(_best(plan), "exchange", None),
                "exchanges": [_plain_forecast(problem, each) for each in plan.forecasts],
            }
            for plan in plans
        ],
    }


def _plain_forecast(problem: Problem, forecast: Forecast) -> dict[str, Any]:
    speed = problem.batch * problem.q_len / forecast.seconds if forecast.seconds else None
    return {**asdict(forecast), "serves": not forecast.reason, "tokens_per_s": speed}
