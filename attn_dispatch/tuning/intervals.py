"""Distribution-free intervals of paired timings, and tests of whether one candidate is surely faster than another.

Independent of attention and of clocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Literal

RatioTest = Literal["faster", "not", "close", "open"]

MARGIN = 0.02  #: share; a smaller difference does not change a choice
# A look is a test of a comparison on the samples so far, as in group-sequential analysis.
ONE_LOOK = 0.95  #: confidence of an interval that is looked at once
#: Confidence of an interval that is looked at repeatedly while samples arrive. A comparison in a race is looked at 18
#: times in 300 rounds, each look erring to one side with probability 0.0005: together less than 0.01 (Boole).
REPEATED = 0.999
LAST_LOOK = 0.99  #: confidence of the one look at the end of the race that the decision is made by
_LEAST_WIDENED = 5  # shared rounds from which `sure_interval` widens an interval that is too short


@dataclass(frozen=True)
class Interval:
    """A closed interval, in the unit of its samples."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Timing:
    """Timings of one candidate, in milliseconds.

    ``samples_ms[i]`` was taken in round ``i``, next to sample ``i`` of every other candidate of the same
    :func:`time_in_rounds`. ``first_ms`` is the very first call, which may include planning and compilation. ``host_ms``
    is the host's time to enqueue one call, ``device_ms`` the device's time of one; None where unknown.

    Raises:
        ValueError: there are no samples, or one is NaN.
    """

    samples_ms: tuple[float, ...]
    first_ms: float
    host_ms: float | None = None
    device_ms: float | None = None

    def __post_init__(self) -> None:
        if not self.samples_ms or any(map(math.isnan, self.samples_ms)):
            raise ValueError("samples_ms must hold at least one sample and no NaN")

    @property
    def median_ms(self) -> float:
        """Median of the samples, in milliseconds."""
        return statistics.median(self.samples_ms)

    @property
    def low_ms(self) -> float:
        """Lower end of the 95 % :func:`median_interval`, in milliseconds; of fewer than 6 samples, the smallest."""
        return median_interval(self.samples_ms).low

    @property
    def high_ms(self) -> float:
        """Upper end of the 95 % :func:`median_interval`, in milliseconds; of fewer than 6 samples, the largest."""
        return median_interval(self.samples_ms).high

    def plus(self, extra_ms: float) -> Timing:
        """The timing with ``extra_ms`` added to every sample."""
        return replace(self, samples_ms=tuple(sample + extra_ms for sample in self.samples_ms))


def median_interval(samples: Sequence[float], confidence: float = ONE_LOOK) -> Interval:
    """Interval that covers the median of the samples' distribution with at least ``confidence``.

    The ends are order statistics, by inversion of the sign test: exact for any continuous distribution (Conover,
    *Practical Nonparametric Statistics*, 3rd ed., section 3.2). Too few samples (under 6 at 95 %, under 11 at
    99.9 %) give the smallest to the largest sample, which covers less.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered), confidence) or 1
    return Interval(ordered[rank - 1], ordered[-rank])


def ratio_interval(candidate: Timing, baseline: Timing, confidence: float = ONE_LOOK) -> Interval:
    """Interval of the median of candidate / baseline, paired by round over the rounds they share.

    Drift common to both cancels out. Without a shared round it is (0, inf); with too few it spans all ratios.
    """
    ratios = paired_ratios(candidate, baseline)
    return median_interval(ratios, confidence) if ratios else Interval(0.0, math.inf)


def sure_interval(candidate: Timing, baseline: Timing) -> Interval:
    """:func:`ratio_interval` at 99.9 %, for comparisons that are looked at repeatedly.

    Fewer than 11 shared rounds span all ratios. From 5 rounds on that span is widened on either side by half of
    its width, halved for each further round: for normal noise one look errs to one side with probability 0.0033 at
    5 rounds, 0.0021 at 7 and 0.0008 at 9 (Student's t). Below 5 rounds use a guard, as :func:`ratio_test` does.
    """
    found, shared = ratio_interval(candidate, baseline, REPEATED), shared_rounds(candidate, baseline)
    if not _LEAST_WIDENED <= shared < fewest(REPEATED) or found.low == found.high:
        return found
    wider = found.half_width * 2.0 ** (_LEAST_WIDENED - shared)
    return Interval(max(found.low - wider, 0.0), found.high + wider)


def faster_at_last_look(candidate: Timing, baseline: Timing, margin: float = MARGIN) -> bool:
    """Whether the 99 % :func:`ratio_interval` lies wholly below ``1 - margin``: the test that a decision is made by.

    Also true where :func:`ratio_test` says "faster", which may have ended the race. Fewer than 8 shared rounds have
    no 99 % interval: then every ratio must lie below ``1 - guard``, here at least twice the margin.
    """
    if ratio_test(candidate, baseline, margin) == "faster":
        return True
    shared = shared_rounds(candidate, baseline)
    guard = margin if shared >= fewest(LAST_LOOK) else max(_guard(shared, margin), 2 * margin)
    return ratio_interval(candidate, baseline, LAST_LOOK).high < 1.0 - guard


def ratio_test(candidate: Timing, baseline: Timing, margin: float = MARGIN, resolution: float = 0.0) -> RatioTest:
    """Test whether a candidate is faster than the baseline by more than the margin.

    "faster": :func:`sure_interval` lies wholly below ``1 - guard``. "not": wholly at or above ``1 - margin``.
    "close": undecided, but the ratio is known to within ``resolution``. "open": more rounds may decide.

    The guard is the margin; with fewer than 6 shared rounds at least 0.02, doubled for each round short of 6: 0.04
    at 5 rounds, 0.64 at one. Equal candidates pass by sign alone with probability 2**-n.
    """
    interval, shared = sure_interval(candidate, baseline), shared_rounds(candidate, baseline)
    if interval.high < 1.0 - _guard(shared, margin):
        return "faster"
    if interval.low >= 1.0 - margin:
        return "not"
    return "close" if shared >= fewest(REPEATED) and interval.half_width <= resolution else "open"


def paired_ratios(candidate: Timing, baseline: Timing) -> list[float]:
    """candidate / baseline in every round that both ran in."""
    return [safe_ratio(*pair) for pair in zip(candidate.samples_ms, baseline.samples_ms, strict=False)]


def shared_rounds(candidate: Timing, baseline: Timing) -> int:
    """Number of rounds that both ran in."""
    return min(len(candidate.samples_ms), len(baseline.samples_ms))


def safe_ratio(value: float, reference: float) -> float:
    """``value / reference``; where a coarse clock read the reference as 0, 1 or inf instead of an error."""
    if reference > 0.0:
        return value / reference
    return math.inf if value > reference else 1.0


@cache
def fewest(confidence: float) -> int:
    """The fewest samples with a :func:`median_interval` of this confidence: 6 at 95 %, 11 at 99.9 %."""
    return next(n for n in range(1, 1100) if _rank(n, confidence))


def _guard(shared: int, margin: float) -> float:
    few = fewest(ONE_LOOK)
    return margin if shared >= few else max(margin, MARGIN) * 2 ** (few - shared)


@cache
def _rank(n: int, confidence: float) -> int:
    """Rank of the interval's ends among ``n`` ordered samples, counted from 1 at either end; 0 without an interval."""
    # Exact: 2**n is beyond a float from n = 1024 on.
    outside = Fraction((1.0 - confidence) / 2) * 2**n
    rank, below, ways = 0, 0, 1
    while below + ways <= outside:
        below += ways
        ways = ways * (n - rank) // (rank + 1)
        rank += 1
    return rank
