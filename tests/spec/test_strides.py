"""Even windows and strides against a second statement of NATTEN's rule: a window that slides until it lies inside."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_dispatch.spec.pattern import Neighborhood
from attn_dispatch.spec.shapes import pair_count

Axis = tuple[int, int, int, int]  #: size, window, dilation, stride


def slid(size: int, window: int, dilation: int, stride: int, causal: bool) -> list[list[int]]:
    """The coordinates that each coordinate of an axis sees."""
    found: list[list[int]] = [[] for _ in range(size)]
    for residue in range(dilation):
        line = list(range(residue, size, dilation))
        for begin in range(0, len(line), stride):
            group = range(len(line))[begin : begin + stride]
            if causal:
                # The window ends at the last query of the group, and each query sees no later key.
                shared = range(group[-1] - window + 1, group[-1] + 1)
                for place in group:
                    found[line[place]] = [line[key] for key in shared if 0 <= key <= place]
                continue
            # One more key before the middle query than after it where the window is even. A group that the end of the
            # line cuts short takes its last query where it has no middle one.
            middle = begin + stride // 2
            while middle not in group:
                middle -= 1
            first = last = middle
            for turn in range(window - 1):
                first, last = (first - 1, last) if turn % 2 == 0 else (first, last + 1)
            while first < 0:
                first, last = first + 1, last + 1
            while last >= len(line):
                first, last = first - 1, last - 1
            for place in group:
                found[line[place]] = line[first : last + 1]
    return found


def seen_on(axis: Axis, causal: bool) -> list[list[int]]:
    size, window, dilation, stride = axis
    pattern = Neighborhood((size,), (window,), (dilation,), (causal,), "shift", (stride,))
    return [row.nonzero().flatten().tolist() for row in pattern.multiplicity(size)[0]]


@st.composite
def axes(draw: st.DrawFn, longest: int) -> Axis:
    size = draw(st.integers(1, longest))
    dilation = draw(st.integers(1, size))
    window = draw(st.integers(1, size // dilation))
    return size, window, dilation, draw(st.integers(1, window))


@pytest.mark.parametrize("causal", [False, True])
def test_every_short_axis(causal: bool) -> None:
    for size in range(1, 13):
        for dilation in range(1, size + 1):
            for window in range(1, size // dilation + 1):
                for stride in range(1, window + 1):
                    axis = size, window, dilation, stride
                    assert seen_on(axis, causal) == slid(*axis, causal), axis


@settings(max_examples=100)
@given(axes(60), st.booleans())
def test_longer_axes(axis: Axis, causal: bool) -> None:
    assert seen_on(axis, causal) == slid(*axis, causal)


@settings(max_examples=60)
@given(st.lists(axes(6), min_size=2, max_size=3), st.data())
def test_a_key_must_be_seen_on_every_axis(given_axes: list[Axis], data: st.DataObject) -> None:
    causal = data.draw(st.lists(st.booleans(), min_size=len(given_axes), max_size=len(given_axes)))
    grid, window, dilation, stride = (tuple(each) for each in zip(*given_axes, strict=True))
    pattern = Neighborhood(grid, window, dilation, tuple(causal), "shift", stride)
    rows = [[0]]
    for axis, flag in zip(given_axes, causal, strict=True):
        along = slid(*axis, flag)
        rows = [[key * axis[0] + y for key in keys for y in along[x]] for keys in rows for x in range(axis[0])]
    assert [row.nonzero().flatten().tolist() for row in pattern.multiplicity(len(rows))[0]] == rows
    q_len = data.draw(st.integers(1, len(rows)))
    assert pair_count(pattern, q_len, len(rows), 3) == 3 * sum(map(len, rows[-q_len:]))


@given(axes(40), st.booleans())
def test_every_query_sees_itself(axis: Axis, causal: bool) -> None:
    """`kernels/hidden.py` relies on it."""
    assert all(x in keys for x, keys in enumerate(seen_on(axis, causal)))


def test_windows_by_hand() -> None:
    assert seen_on((6, 4, 1, 1), False) == [[0, 1, 2, 3]] * 3 + [[1, 2, 3, 4]] + [[2, 3, 4, 5]] * 2
    assert seen_on((6, 2, 1, 1), True) == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert seen_on((8, 4, 1, 3), False) == [[0, 1, 2, 3]] * 3 + [[2, 3, 4, 5]] * 3 + [[4, 5, 6, 7]] * 2
    assert seen_on((7, 3, 1, 2), True) == [[0], [0, 1], [1, 2], [1, 2, 3], [3, 4], [3, 4, 5], [4, 5, 6]]
    assert seen_on((7, 2, 2, 2), False) == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [3, 5], [4, 6]]
