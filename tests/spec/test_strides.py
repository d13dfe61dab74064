"""Even windows and strides: every short axis against the definition, and some by hand."""

from __future__ import annotations

import pytest

from attn_dispatch.spec.pattern import Neighborhood
from tests.support.definition import slid

Axis = tuple[int, int, int, int]  #: size, window, dilation, stride


def seen_on(axis: Axis, causal: bool) -> list[list[int]]:
    size, window, dilation, stride = axis
    pattern = Neighborhood((size,), (window,), (dilation,), (causal,), "shift", (stride,))
    return [row.nonzero().flatten().tolist() for row in pattern.multiplicity(size)[0]]


@pytest.mark.parametrize("causal", [False, True])
def test_every_short_axis(causal: bool) -> None:
    """Every query sees itself, too: `kernels/hidden.py` relies on it."""
    for size in range(1, 13):
        for dilation in range(1, size + 1):
            for window in range(1, size // dilation + 1):
                for stride in range(1, window + 1):
                    axis = size, window, dilation, stride
                    found = seen_on(axis, causal)
                    assert found == slid(*axis, causal), axis
                    assert all(x in keys for x, keys in enumerate(found)), axis
