"""What paired samples say: intervals without assumptions about the shape of the noise, and when one is surely faster.

Nothing here knows of attention or of clocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Literal

Verdict = Literal["faster", "not", "close", "open"]

MARGIN = 0.02  #: a difference of less than this share is no reason to change anything
ONE_LOOK = 0.95  #: confidence of an interval that is looked at once
#: Confidence of an interval that is looked at again and again while samples come in. A comparison of a race is looked
#: at 18 times in 300 rounds, each of which errs to one side with 0.0005: together with less than 0.01 (Boole).
REPEATED = 0.999
LAST_LOOK = 0.99  #: confidence of the look that a decision is made by, once, when the race is over
_LEAST_WIDENED = 5


@dataclass(frozen=True)
class Interval:
    """A closed interval, in the unit of the samples it was made from."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Timing:
    """What was seen of one candidate.

    ``samples_ms[i]`` was taken in round ``i``, next to sample ``i`` of every other candidate of the same
    :func:`time_in_turns`. ``first_ms`` is the very first call, which may include planning and compilation. ``host_ms``
    is what the host needs to enqueue one call, and ``cold_ms`` a call whose data the L2 cache does not hold; both None
    where they are not known. Raises :class:`ValueError` without samples or with a NaN among them.
    """

    samples_ms: tuple[float, ...]
    first_ms: float
    host_ms: float | None = None
    cold_ms: float | None = None

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
        """The same with ``extra_ms`` more in every sample."""
        return replace(self, samples_ms=tuple(sample + extra_ms for sample in self.samples_ms))


def median_interval(samples: Sequence[float], confidence: float = ONE_LOOK) -> Interval:
    """Interval that covers the median of the samples' distribution with at least ``confidence``.

    The ends are order statistics, by inversion of the sign test, so coverage is exact for any continuous
    distribution (Conover, *Practical Nonparametric Statistics*, 3rd ed., section 3.2). Too few samples, which is
    fewer than 6 at 95 % and fewer than 11 at 99.9 %, have no such interval: theirs is the smallest to the largest
    sample, which covers less. Raises :class:`ValueError` without samples or for a confidence outside (0, 1).
    """
    if not samples or not 0.0 < confidence < 1.0:
        raise ValueError("median_interval needs at least one sample and a confidence between 0 and 1")
    ordered = sorted(samples)
    rank = _rank(len(ordered), confidence) or 1
    return Interval(ordered[rank - 1], ordered[-rank])


def ratio_interval(candidate: Timing, baseline: Timing, confidence: float = ONE_LOOK) -> Interval:
    """Interval of the median of candidate / baseline, paired round by round over the rounds they share.

    Drift that both meet alike cancels out. Without a shared round it is (0, inf), with too few it spans all.
    """
    ratios = paired_ratios(candidate, baseline)
    return median_interval(ratios, confidence) if ratios else Interval(0.0, math.inf)


def sure_interval(candidate: Timing, baseline: Timing) -> Interval:
    """:func:`ratio_interval` at 99.9 %, which stands being looked at after every so many rounds.

    Fewer than 11 shared rounds have no such interval: theirs spans all ratios. From 5 on it is widened on either side
    by half of that, and by half as much for each further round, so that for normal noise one look errs to one side
    with 0.0033 at 5 rounds, 0.0021 at 7 and 0.0008 at 9 (Student's t). Fewer than 5 are a case for a guard.
    """
    found, shared = ratio_interval(candidate, baseline, REPEATED), shared_rounds(candidate, baseline)
    if not _LEAST_WIDENED <= shared < fewest(REPEATED) or found.low == found.high:
        return found
    wider = found.half_width * 2.0 ** (_LEAST_WIDENED - shared)
    return Interval(max(found.low - wider, 0.0), found.high + wider)


def surely_faster(candidate: Timing, baseline: Timing, margin: float = MARGIN) -> bool:
    """Whether :func:`sure_interval` lies wholly below ``1 - guard``.

    The guard is the margin; with fewer than 6 shared rounds it is no less than 0.02, doubled for each round short of
    6: with the default 0.04 at 5 rounds and 0.64 at a single one. Equal candidates pass by sign alone with probability
    2**-n, which the guard makes up for.
    """
    return verdict(candidate, baseline, margin) == "faster"


def faster_at_last(candidate: Timing, baseline: Timing, margin: float = MARGIN) -> bool:
    """Whether the 99 % :func:`ratio_interval` lies wholly below ``1 - margin``: the look that a decision is made by.

    Fewer than 8 shared rounds have no such interval. Then every ratio must lie below ``1 - guard``, with that of
    :func:`surely_faster`, but of no less than twice the margin; or it surely is, as in a race it decided.
    """
    if surely_faster(candidate, baseline, margin):
        return True
    shared = shared_rounds(candidate, baseline)
    guard = margin if shared >= fewest(LAST_LOOK) else max(_guard(shared, margin), 2 * margin)
    return ratio_interval(candidate, baseline, LAST_LOOK).high < 1.0 - guard


def verdict(candidate: Timing, baseline: Timing, margin: float = MARGIN, resolution: float = 0.0) -> Verdict:
    """What is sure of a candidate that would have to be faster than the baseline by more than the margin.

    "faster": it is, see :func:`surely_faster`. "not": it is not, :func:`sure_interval` lies wholly at or above
    ``1 - margin``. "close": neither, but their ratio is known to within ``resolution``. "open": more rounds may tell.
    """
    interval, shared = sure_interval(candidate, baseline), shared_rounds(candidate, baseline)
    if interval.high < 1.0 - _guard(shared, margin):
        return "faster"
    if interval.low >= 1.0 - margin:
        return "not"
    return "close" if shared >= fewest(REPEATED) and interval.half_width <= resolution else "open"


def paired_ratios(candidate: Timing, baseline: Timing) -> list[float]:
    """candidate / baseline in every round that both have."""
    return [safe_ratio(*pair) for pair in zip(candidate.samples_ms, baseline.samples_ms, strict=False)]


def shared_rounds(candidate: Timing, baseline: Timing) -> int:
    """How many rounds both have."""
    return min(len(candidate.samples_ms), len(baseline.samples_ms))


def safe_ratio(value: float, reference: float) -> float:
    """``value / reference``, where a clock too coarse to see either gives 1 and inf instead of an error."""
    if reference > 0.0:
        return value / reference
    return math.inf if value > reference else 1.0


@cache
def fewest(confidence: float) -> int:
    """The fewest samples that have a :func:`median_interval` of that confidence: 6 at 95 %, 11 at 99.9 %."""
    return next(n for n in range(1, 1100) if _rank(n, confidence))


def _guard(shared: int, margin: float) -> float:
    few = fewest(ONE_LOOK)
    return margin if shared >= few else max(margin, MARGIN) * 2 ** (few - shared)


@cache
def _rank(n: int, confidence: float) -> int:
    """Which of ``n`` ordered samples, counted from 1 at either end, are the ends; 0 where there is no interval."""
    # Exact: 2**n is beyond a float from n = 1024 on.
    outside = Fraction((1.0 - confidence) / 2) * 2**n
    rank, below, ways = 0, 0, 1
    while below + ways <= outside:
        below += ways
        ways = ways * (n - rank) // (rank + 1)
        rank += 1
    return rank
