"""Triton's kernels with a head_dim between two powers of two, which is the sum of two."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attn_dispatch.backends import triton, triton_tiles
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import HEAD_DIM_LIMIT, SMALLEST_SIDE, padded, parts_of
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_triton import CUDA, fake_gpu, interpreted
from tests.support.pairwise import thinned

HEAD_DIMS = (80, 96, 160, 192)
DILATED = Dilated((16, 32), (1, 2), is_causal=True)
KINDS: dict[str, tuple[Any, Pattern]] = {
    "causal": (triton, Dense(is_causal=True)),
    "dilated": (triton, DILATED),
    "tiles": (triton_tiles, DILATED),
}


def test_parts_of_a_head_dim() -> None:
    found = {head_dim: parts_of(head_dim) for head_dim in (1, 17, 40, 64, 72, 80, 96, 112, 160, 192, 200, 256)}
    assert found == {
        1: (16, 0),
        17: (32, 0),  # 16 + 16 is no less
        40: (32, 16),
        64: (64, 0),
        72: (64, 16),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        160: (128, 32),
        192: (128, 64),
        200: (256, 0),
        256: (256, 0),
    }
    for head_dim in range(1, HEAD_DIM_LIMIT + 1):
        first, rest = parts_of(head_dim)
        assert head_dim <= first + rest <= padded(head_dim)
        assert first == padded(first)
        assert rest == 0 or SMALLEST_SIDE <= rest == padded(rest) < first


@pytest.mark.full
@interpreted
@pytest.mark.usefixtures("triton_interpreter")
@thinned(("masked", "kind", "head_dim"), product([True, False], KINDS, HEAD_DIMS), 5)
def test_sums_of_two_powers(masked: bool, kind: str, head_dim: int) -> None:
    """Grouped heads, forward and backward, against float64."""
    backend, pattern = KINDS[kind]
    case = Case("sum", pattern, (1, 40, 4, head_dim), kv_heads=2, key_mask=masked, seq_lens=masked, scale=-0.3)
    gate = Oracle.of(make(case.problem(torch.float32, needs_grad=True)))
    assert gate.check(gate.run(adapted(backend))).failures == ()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_is_that_of_both_parts(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    for each in (triton.FORWARD, triton.BACKWARD_Q, triton.BACKWARD_KV):
        whole = replace(CUDA, head_dim=padded(head_dim))
        block = triton.block_configs(each, whole)[0]
        scores = whole.dtype.itemsize * block.rows * block.columns
        needed = support.shared_bytes(each, replace(whole, head_dim=head_dim), block) - scores
        assert needed * padded(head_dim) == (support.shared_bytes(each, whole, block) - scores) * head_dim
