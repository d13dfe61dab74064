"""How a rank's work is split: rows of other ranks are received in pieces, runs of a sequence are computed in blocks.

Messages and partial results then take little memory compared with a shard, and there are rows to compute on while the
next piece is received.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.pattern import Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band

MOST = 16  #: blocks of a shard's rows
#: Fewest rows and operations of a block. Merging its results takes as long as computing on some tens of keys, and
#: Python takes about 0.2 ms. The numbers for CUDA are estimates, not measured.
LEAST_ROWS = {"cpu": 512, "cuda": 4096}
LEAST_WORK = {"cpu": 2.5e8, "cuda": 1e11}


def block_rows(problem: Problem, layout: Layout) -> int:
    """Most rows of q or k of a block; the same on every rank. A single rank computes in one block."""
    if layout.ranks == 1:
        return layout.tokens
    device = problem.device.type if problem.device.type in LEAST_ROWS else "cuda"
    element = 4 * problem.batch * problem.heads * problem.head_dim
    least = max(LEAST_ROWS[device], math.isqrt(int(LEAST_WORK[device]) // element))
    return max(least, -(-max(layout.lengths) // MOST))


def pieces(problem: Problem, layout: Layout) -> int:
    """Number of messages in which a rank sends its rows to another; equal for all pairs, which match them by order.

    It is 1 for patterns that need single rows of a run: these are few.
    """
    pattern, longest = problem.pattern, max(layout.lengths)
    bands = line_of(pattern, layout.tokens)
    if bands is None:
        return 1
    runs, widths = max(map(len, layout.chunks)), 0
    for band in bands:
        if band.low is not None and band.high is not None:
            widths += runs * (band.high - band.low)
        else:
            widths += longest if band.stop is None else band.stop
    return max(1, -(-min(longest, widths) // block_rows(problem, layout)))


def own_shares(own: float, far: float, steps: int, backward: bool) -> list[float]:
    """The shares of the rank's own work to do in each step while messages are sent, so that steps take equally long.

    A forward pass does none in its last step, in which nothing is sent: its share is left out. A backward pass sends
    gradients then.

    Args:
        own, far: work on the rank's own rows, and on the rows of each later step.
        steps: number of steps; the first one has no rows of other ranks.
    """
    slots = steps if backward else max(1, steps - 1)
    length = (own + (slots - 1) * far) / slots
    if length <= far:
        return [own] + [0.0] * (slots - 1)
    return [length] + [length - far] * (slots - 1)


def cut(run: range, most: int) -> Iterator[range]:
    """Parts of about the same length, each of at most `most`."""
    count = max(1, -(-len(run) // most))
    for number in range(count):
        yield run[len(run) * number // count : len(run) * (number + 1) // count]


def line_of(pattern: Pattern, tokens: int) -> tuple[Band, ...] | None:
    """The branches of a pattern that are windows on the sequence; None if some branch is not (it has segments)."""
    bands = pattern.bands(tokens, tokens, ())
    return bands if bands and all(band.segment is None for band in bands) else None


def overlap(band: Band, queries: range, keys: range) -> tuple[range, range, Window] | None:
    """The queries of a run that see any key of another run, the keys that they see, and the window between them."""
    if band.stop is not None:
        keys = range(keys.start, min(keys.stop, band.stop))
    if band.low is not None:
        keys = range(max(keys.start, queries.start + band.low), keys.stop)
        queries = range(queries.start, min(queries.stop, keys.stop - band.low))
    if band.high is not None:
        keys = range(keys.start, min(keys.stop, queries.stop + band.high))
        queries = range(max(queries.start, keys.start - band.high), queries.stop)
    if not queries or not keys:
        return None
    # The last query lines up with the last key.
    ahead = keys.stop - queries.stop
    left = None if band.low is None else ahead - band.low
    right = None if band.high is None else band.high - ahead
    return queries, keys, Window(left, right)


def blocks(band: Band, queries: range, keys: range, most: int) -> Iterator[tuple[range, range, Window]]:
    """`overlap` of blocks of at most `most` queries and keys; of a window with two ends, with all keys of a block."""
    along = len(keys) if band.low is not None and band.high is not None else most
    for some in cut(queries, most):
        for these in cut(keys, along):
            found = overlap(band, some, these)
            if found is not None:
                yield found


def segments(pattern: Dilated, run: range, most: int) -> Iterator[range]:
    """Parts of about `most` positions of a run, each of whole segments of every branch; the run itself if it starts
    inside a segment.
    """
    period = math.lcm(*pattern.segment_lengths)
    if run.start % period:
        yield run
        return
    step = max(1, most // period) * period
    for at in range(0, len(run), step):
        yield run[at : at + step]
