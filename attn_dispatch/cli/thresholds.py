"""The output of `inspect --thresholds`: lengths above which a token order is faster, densities below which backends
that skip what a mask made of data hides are, and the measured gains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from attn_dispatch.cli import stored
from attn_dispatch.cli.plots import curve
from attn_dispatch.cli.tables import Table, print_json
from attn_dispatch.learning.speedups import PER_DENSITY, SpeedupSeries, all_series, density_series, family_title
from attn_dispatch.learning.thresholds import MIN_LENGTHS, Threshold, by_length, threshold_of
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import where_true

DENSITY_HEAD = ("mask", "shape", "dtype", "direction", "densities", "gain at the sparsest", "pays")
DENSITY_LEFT = {0, 1, 2, 3, 6}
HEAD = ("pattern", "dtype", "head_dim", "direction", "order", "lengths", "gain at the longest", "pays")
LEFT = {0, 1, 3, 4, 7}
NOTHING = (
    "no decision compares another token order with the natural one; 'attn-dispatch profile --thresholds --grid 64,64 "
    "--window 13,13' measures some"
)
EXPLAINED = (
    "gain: time of the best candidate in natural order / time of the best in this order, permuting included",
    "an order pays where the lower end of the gain's interval is above 1 at this and all longer lengths",
)
DENSITY_EXPLAINED = (
    "gain: time of the fastest backend that computes all pairs and masks / time of the fastest that skips blocks",
    "skipping pays where the lower end of the gain's interval is above 1 at this and all lower densities",
)


def run(folder: Path, as_json: bool) -> int:
    """Print the thresholds of all families of problems timed in more than one order; returns the exit code."""
    decisions = [decision for _, decision in stored.decisions(folder)]
    if as_json:
        print_json({"folder": str(folder), **to_dicts(decisions)})
    else:
        print(*lines(decisions), sep="\n")
    return 0


def lines(decisions: Sequence[Decision]) -> list[str]:
    """What there is of orders and densities."""
    return [*_order_lines(all_series(decisions)), *_density_lines(density_series(decisions))] or [NOTHING]


def _density_lines(found: Iterable[SpeedupSeries]) -> list[str]:
    """A table for each silicon."""
    printed: list[str] = []
    for silicon, members in groupby(paired(found), key=lambda pair: pair[0].silicon):
        rows = [_density_cells(*pair) for pair in members]
        printed += [f"silicon   {silicon}", "", *Table(DENSITY_HEAD, rows, DENSITY_LEFT).lines(), ""]
    return [*printed, *DENSITY_EXPLAINED] if printed else []


def _density_cells(series: SpeedupSeries, threshold: Threshold | None) -> list[str]:
    points, problem = by_length(series.speedups), series.problem
    q, heads = (problem.get(name) for name in ("q_len", "heads"))
    keys = "" if problem.get("k_len") == q else f" x {problem.get('k_len')}"
    shape = f"{problem.get('batch')} x {q}{keys}, {heads}/{problem.get('kv_heads')} heads of {problem.get('head_dim')}"
    sparsest = ratio_text(points[-1].low, points[-1].factor, points[-1].high) if points else "-"
    what = family_title(series.family), shape, str(problem.get("dtype")), _direction(series)
    return [*what, str(len(points)), sparsest, density_text(threshold)]


def density_text(threshold: Threshold | None) -> str:
    """`below 23 % (18 % - 25 %)`."""
    if threshold is None:
        return f"needs more densities: {MIN_LENGTHS} at least"
    ends = threshold.tokens, threshold.low, threshold.high
    at, low, high = (None if n is None else f"{float(f'{100 * PER_DENSITY / n:.2g}'):g} %" for n in ends)
    if at is None:
        return f"never (down to {low} measured)"
    return f"up to {at}, the densest measured" if low is None else f"below {at} ({high} - {low})"


def _density_dict(series: SpeedupSeries, threshold: Threshold | None) -> dict[str, Any]:
    """As `_to_dict`, with densities in place of lengths."""
    plain = _to_dict(series, threshold)
    shape = {name: series.problem.get(name) for name in ("batch", "q_len", "k_len", "heads", "kv_heads")}
    names = {"tokens": "density", "low": "high", "high": "low"}  # the farther, the sparser
    ends = {name: None if plain[old] is None else PER_DENSITY / plain[old] for old, name in names.items()}
    points = [{"density": PER_DENSITY / each.pop("tokens"), **each} for each in plain.pop("points")]
    verdict = "below" if plain["verdict"] == "above" else plain["verdict"]
    kept = {name: plain[name] for name in ("silicon", "group", "pattern", "dtype", "head_dim", "direction")}
    return {**kept, **shape, "verdict": verdict, **ends, "points": points}


def _order_lines(found: Iterable[SpeedupSeries]) -> list[str]:
    """A table for each silicon, and a picture of each threshold."""
    printed: list[str] = []
    for silicon, members in groupby(paired(found), key=lambda pair: pair[0].silicon):
        pairs = list(members)
        printed += [f"silicon   {silicon}", "", *table(pairs).lines(), ""]
        for series, threshold in pairs:
            if threshold is not None:
                printed += [*_picture(series, threshold), ""]
    return [*printed, *EXPLAINED] if printed else []


def paired(found: Iterable[SpeedupSeries]) -> list[tuple[SpeedupSeries, Threshold | None]]:
    """Each series with its threshold, by silicon, then pattern."""

    def place(series: SpeedupSeries) -> tuple[str, str, int, list[str], str]:
        head_dim = series.problem.get("head_dim") or 0
        return series.silicon, family_title(series.family), head_dim, _name(series), series.group

    return [(each, threshold_of(each)) for each in sorted(found, key=place)]


def table(pairs: Sequence[tuple[SpeedupSeries, Threshold | None]]) -> Table:
    """Each series, and the length from which its order pays."""
    caption = "Token orders, and the length from which each pays"
    return Table(HEAD, [_cells(*pair) for pair in pairs], LEFT, caption, NOTHING)


def _name(series: SpeedupSeries) -> list[str]:
    problem = series.problem
    what = (str(problem.get("dtype")), str(problem.get("head_dim")), _direction(series))
    return [family_title(series.family), *what, series.order]


def to_dicts(decisions: Sequence[Decision]) -> dict[str, list[dict[str, Any]]]:
    """Plain values for JSON; lengths in tokens."""
    densities = [_density_dict(*pair) for pair in paired(density_series(decisions))]
    return {"thresholds": [_to_dict(*pair) for pair in paired(all_series(decisions))], "densities": densities}


def _to_dict(series: SpeedupSeries, threshold: Threshold | None) -> dict[str, Any]:
    lengths, found = by_length(series.speedups), {name: series.problem.get(name) for name in ("dtype", "head_dim")}
    return {
        "silicon": series.silicon,
        "group": series.group,
        "pattern": series.family,
        **found,
        "direction": _direction(series),
        "order": series.order,
        "verdict": "unknown" if threshold is None else "never" if threshold.tokens is None else "above",
        **{name: getattr(threshold, name, None) for name in ("tokens", "low", "high")},
        "measured_to": lengths[-1].tokens if lengths else None,
        "points": [
            {"tokens": each.tokens, "gain": each.factor, "low": each.low, "high": each.high, "key": each.key}
            for each in sorted(series.speedups, key=lambda each: (each.tokens, each.key))
        ],
    }


def _picture(series: SpeedupSeries, threshold: Threshold) -> list[str]:
    points = [(each.tokens, each.low, each.factor, each.high) for each in by_length(threshold.points)]
    pattern, *what = _name(series)
    return [f"{pattern} {', '.join(what)}: {threshold_text(threshold)}", *curve(points, threshold.tokens)]


def _cells(series: SpeedupSeries, threshold: Threshold | None) -> list[str]:
    lengths = by_length(series.speedups)
    longest = ratio_text(lengths[-1].low, lengths[-1].factor, lengths[-1].high) if lengths else "-"
    return [*_name(series), str(len(lengths)), longest, threshold_text(threshold)]


def threshold_text(threshold: Threshold | None) -> str:
    """`above 3,100 tokens (2,048 - 4,096)`."""
    if threshold is None:
        return f"needs more lengths: {MIN_LENGTHS} at least"
    if threshold.tokens is None or threshold.high is None:
        return f"never (up to {threshold.low:,} measured)"
    if threshold.low is None:
        return f"from {threshold.tokens:,} tokens on, the shortest measured"
    rounded = round(threshold.tokens, 1 - math.floor(math.log10(threshold.tokens)))
    tokens = rounded if threshold.low <= rounded <= threshold.high else threshold.tokens
    return f"above {tokens:,} tokens ({threshold.low:,} - {threshold.high:,})"


def _direction(series: SpeedupSeries) -> str:
    """Forward or forward + backward, and the other properties that part groups."""
    problem = series.problem
    held = {
        "seq_lens": problem.get("has_seq_lens"),
        "key_mask": problem.get("has_key_mask"),
        "dropout": problem.get("dropout_p"),
        f"ranks {problem.get('ranks')}": problem.get("ranks") not in (None, 1),
    }
    return " ".join(["forward + backward" if problem.get("needs_grad") else "forward", *where_true(held)])


def ratio_text(low: float, middle: float, high: float) -> str:
    """`1.37x (1.35 - 1.40)`."""
    return f"{middle:.2f}x ({low:.2f} - {high:.2f})"
