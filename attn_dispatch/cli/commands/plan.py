"""Predict peak memory, bytes sent and time of attention over a sequence on many ranks, for each exchange of rows.
Counts operations and bytes; measures and runs nothing, so --ranks may exceed this machine's devices.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_dispatch.cli import options
from attn_dispatch.cli.tables import Table, compact, print_json
from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.rows.layout import KINDS
from attn_dispatch.text import gib, milliseconds, printable

if TYPE_CHECKING:
    from attn_dispatch.ring.plan.forecast import Forecast
    from attn_dispatch.ring.plan.rates import Rate
    from attn_dispatch.spec.problem import Problem

EXAMPLE = """examples:
  attn-dispatch plan --tokens 512M --ranks 64 --segments 2k,64M --dilations 1,32k --dtype bf16 --link 50 --rate 200
      half a billion tokens over 64 ranks
  attn-dispatch plan --tokens 1M --ranks 1,2,4,8 --causal --layout zigzag --backward --link 10
      a training step, at the rate measured on this machine"""

HEAD = ("ranks", "exchange", "memory", "buffers", "sends", "all send", "time", "tokens/s", "speed-up", "verdict")
LEFT = {1, 9}
EXPLAINED = (
    "predicted, not measured: operations / rate and bytes / link, overlapped as in the engine; without latency; parts",
    "that are computed by position are assumed to be as fast as the rest",
    "memory: largest peak of any rank, q, k, v and results included; sends: most bytes sent by any rank",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", metavar="N", type=options.count, help="sequence length; may end in k or M: 1M is 1048576")
    ranks = "number of ranks that share the sequence; A:B doubles from A up to B"
    add("--ranks", metavar="P,..", type=options.lengths, required=True, help=ranks)
    link = "of each rank, each way; a GB is 10**9 bytes"
    add("--link", metavar="GB/s", type=options.positive, required=True, help=link)
    rate = "of each rank on query-key pairs; by default of the fastest backend in the nearest decision stored here"
    add("--rate", metavar="TFLOP/s", type=options.positive, help=rate)
    add("--heads", metavar="H", type=options.count, default=options.DEFAULT.heads, help="of q; by default %(default)s")
    add("--kv-heads", metavar="H", type=options.count, help="of k and v; by default as many as q has")
    add("--head-dim", metavar="D", type=options.count, default=options.DEFAULT.head_dim, help="by default %(default)s")
    add("--batch", metavar="B", type=options.count, default=1, help="by default %(default)s")
    layout = "one chunk for each rank, or an early and a late one, which balances causal work"
    add("--layout", choices=KINDS, default=KINDS[0], help=layout)
    add("--lse", action="store_true", help="return lse; with --backward, lse has a gradient too")
    options.add_others(add)


class RankForecasts(NamedTuple):
    """The forecasts for one number of ranks."""

    ranks: int
    lengths: tuple[int, ...]
    forecasts: list[Forecast]

    @property
    def best(self) -> Forecast | None:
        """The fastest one; None without times."""
        timed = [each for each in self.forecasts if each.seconds is not None]
        return min(timed, key=lambda each: each.seconds or 0.0, default=None)


def run(args: argparse.Namespace) -> int:
    problem = _problem(args)
    from attn_dispatch.ring.plan.rates import Rate, rate_near  # here, so that usage errors do not wait for torch

    nearest = rate_near(problem, -(-problem.q_len // max(args.ranks))) if args.rate is None else None
    rate = nearest if args.rate is None else Rate(args.rate * 1e12, "--rate")
    if rate is None:
        dtype, heads = str(problem.dtype).removeprefix("torch."), f"{problem.heads}/{problem.kv_heads}"
        more = f"attn-dispatch profile --shape {problem.batch},8k,{heads},{problem.head_dim} --dtype {dtype}"
        why = f"no stored decision in {dtype} is large enough: give --rate, or measure with '{more}'"
        print(f"attn-dispatch plan: no time is predicted: {why}", file=sys.stderr)
    plans = _plans(args, problem, rate)
    if args.json:
        print_json(_to_dict(args, problem, rate, plans))
    else:
        print(*map(printable, _lines(args, problem, rate, plans)), sep="\n")
    return 0


def _problem(args: argparse.Namespace) -> Problem:
    """The problem of the whole sequence."""
    if (args.tokens is None) == (args.grid is None):
        raise InvalidInput("give the length of the sequence: --tokens N or --grid H,W, not both")
    tokens = math.prod(args.grid) if args.tokens is None else args.tokens
    shape = options.Shape(args.batch, tokens, args.heads, args.kv_heads or args.heads, args.head_dim)
    args.shape, args.lengths = [shape], None
    problem, *others = options.problems_of(args)
    if others:
        raise InvalidInput("a plan is for one problem: --dtype takes one, --causal and --backward not 'both'")
    return replace(problem, return_lse=args.lse)


def _plans(args: argparse.Namespace, problem: Problem, rate: Rate | None) -> list[RankForecasts]:
    from rich.console import Console

    from attn_dispatch.ring.plan.forecast import forecasts_over
    from attn_dispatch.ring.plan.schedule import RankSpeed
    from attn_dispatch.ring.rows.layout import Layout, deal

    speed = None if rate is None else RankSpeed(rate.operations_per_s, args.link * 1e9)
    found = []
    with Console(stderr=True).status("") as status:
        for ranks in args.ranks:
            status.update(f"counting over {ranks} ranks")
            lengths = deal(problem.q_len, ranks)
            found.append(RankForecasts(ranks, lengths, forecasts_over(problem, Layout(lengths, args.layout), speed)))
    return found


# --- output -----------------------------------------------------------------------------------------------------------


def _lines(args: argparse.Namespace, problem: Problem, rate: Rate | None, plans: Sequence[RankForecasts]) -> list[str]:
    shards = f"{args.layout} shards on {problem.device.type}, {args.link:g} GB/s each way"
    found = [f"problem   {problem}", f"shards    {shards}"]
    if rate is not None:
        found.append(f"rate      {rate.operations_per_s / 1e12:.3g} TFLOP/s for each rank ({rate.source})")
    rows = [_cells(problem, plan, each, plans[0]) for plan in plans for each in plan.forecasts]
    found += ["", *Table(HEAD, rows, LEFT).lines(), "", *EXPLAINED]
    most = max((each.memory.setup_bytes for plan in plans for each in plan.forecasts if each.memory), default=0)
    if most:
        found.append(f"first call: about {gib(most)} more on each rank's host, to compute which rows go where")
    return found


def _cells(problem: Problem, plan: RankForecasts, forecast: Forecast, first: RankForecasts) -> list[str]:
    start, memory, best, base = [str(plan.ranks), forecast.exchange], forecast.memory, plan.best, first.best
    if memory is None:
        return [*start, *"-" * 7, f"no: {forecast.reason}"]
    figures = [memory.peak_bytes, memory.buffer_bytes, forecast.shipped_bytes or 0, forecast.shipped_total_bytes or 0]
    times, speed = ["-"] * 3, _speed(problem, forecast)
    if forecast.seconds and speed and base is not None and base.seconds:
        times = [milliseconds(forecast.seconds * 1e3), f"{speed:,.0f}", f"{base.seconds / forecast.seconds:.2f}x"]
    return [*start, *map(gib, figures), *times, "fastest" if forecast is best else ""]


def _to_dict(
    args: argparse.Namespace, problem: Problem, rate: Rate | None, plans: Sequence[RankForecasts]
) -> dict[str, Any]:
    return {
        "problem": problem.to_dict(),
        "title": compact(str(problem)),
        "layout": args.layout,
        "link_bytes_per_s": args.link * 1e9,
        "rate": None if rate is None else {"operations": rate.operations_per_s, "source": rate.source, "key": rate.key},
        "plans": [
            {
                "ranks": plan.ranks,
                "tokens": list(plan.lengths),
                "fastest": None if plan.best is None else plan.best.exchange,
                "exchanges": [
                    {**asdict(each), "serves": not each.reason, "tokens_per_s": _speed(problem, each)}
                    for each in plan.forecasts
                ],
            }
            for plan in plans
        ],
    }


def _speed(problem: Problem, forecast: Forecast) -> float | None:
    """Tokens per second."""
    return problem.batch * problem.q_len / forecast.seconds if forecast.seconds else None
