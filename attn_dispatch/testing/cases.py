"""Problems that every backend is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import CONTIGUOUS, Problem
from attn_dispatch.spec.tensors import normal_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Case:
    """Shapes [batch, q_len, heads, head_dim], with k_len and kv_heads where they differ."""

    id: str
    pattern: Pattern
    shape: tuple[int, int, int, int]
    k_len: int | None = None
    kv_heads: int | None = None
    seq_lens: bool = False
    key_mask: bool = False
    strides: tuple[str, str, str] = CONTIGUOUS
    scale: float | None = None

    def problem(self, dtype: torch.dtype, *, needs_grad: bool, device: torch.device | str = "cpu") -> Problem:
        batch, q_len, heads, head_dim = self.shape
        k_len = q_len if self.k_len is None else self.k_len
        self.pattern.check(q_len, k_len)
        scale = float(head_dim) ** -0.5 if self.scale is None else self.scale
        pattern = self.pattern.simplify(q_len, k_len, heads)
        sizes = batch, q_len, k_len, heads, self.kv_heads or heads, head_dim
        more: dict[str, Any] = {"has_seq_lens": self.seq_lens, "has_key_mask": self.key_mask, "strides": self.strides}
        more |= {"needs_grad": needs_grad, "return_lse": True}
        return Problem(pattern, *sizes, dtype, torch.device(device), scale, **more)


LONGNET = Dilated((32, 64, 128), (1, 2, 4))
CAUSAL = Dilated((32, 64, 128), (1, 2, 4), is_causal=True)
STRIDED = Neighborhood((11, 7), (5, 4), (2, 1), (False, True), "shift", (2, 3))
STRIDED_3D = Neighborhood((5, 4, 6), (4, 2, 3), (1, 2, 1), (True, False, False), "shift", (3, 1, 2))
STRIDED_END = Neighborhood((9, 8), (4, 5), edges="shift", stride=(4, 2))
STRIDED_CAUSAL = Neighborhood((9, 8), (5, 4), (1, 2), (True, False), "shift", (3, 2))

CASES = (
    Case("dense", Dense(), (1, 64, 4, 16)),
    Case("dense-tiles", Dense(), (2, 321, 2, 32)),
    Case("dense-odd-head-dim", Dense(), (3, 33, 3, 7)),
    Case("dense-grouped", Dense(), (2, 40, 6, 16), kv_heads=2),
    Case("dense-one-key-head", Dense(), (2, 40, 6, 16), kv_heads=1),
    Case("dense-cross", Dense(), (2, 30, 2, 16), k_len=77),
    Case("dense-key-mask", Dense(), (3, 50, 2, 16), key_mask=True),
    Case("dense-seq-lens", Dense(), (3, 50, 2, 16), seq_lens=True),
    Case("causal", Dense(is_causal=True), (2, 321, 2, 32)),
    Case("causal-one-token", Dense(is_causal=True), (2, 1, 4, 16), k_len=90, kv_heads=2),
    Case("causal-few-tokens", Dense(is_causal=True), (2, 5, 4, 16), k_len=90, kv_heads=2),
    Case("causal-rows-without-keys", Dense(is_causal=True), (2, 60, 4, 16), k_len=41),
    Case("causal-key-mask", Dense(is_causal=True), (3, 50, 2, 16), key_mask=True),
    Case("causal-both-masks", Dense(is_causal=True), (3, 50, 4, 16), kv_heads=2, key_mask=True, seq_lens=True),
    Case("scale-given", Dense(), (1, 40, 2, 16), scale=-0.7),
    Case("large-scores", Dense(is_causal=True), (1, 70, 2, 16), scale=30.0),
    Case("window-causal", Window(7, 0), (2, 61, 2, 16)),
    Case("window-both-sides", Window(3, 5), (1, 61, 2, 16)),
    Case("window-ahead", Window(None, 4), (1, 20, 2, 16), k_len=50),
    Case("window-rows-without-keys", Window(2, 0), (1, 50, 2, 16), k_len=20),
    Case("window-key-mask", Window(3, 0), (2, 30, 4, 16), kv_heads=2, key_mask=True),
    Case("window-sinks", Window(7, 0, 4), (2, 121, 2, 16)),
    Case("window-sinks-ahead", Window(5, None, 3), (1, 20, 4, 16), k_len=50, kv_heads=2),
    Case("window-sinks-both-sides", Window(30, 3, 70), (1, 200, 2, 16)),
    Case("window-sinks-rows-without-keys", Window(2, 0, 6), (1, 50, 2, 16), k_len=20),
    Case("window-sinks-one-query", Window(7, 0, 4), (2, 1, 4, 16), k_len=90, kv_heads=2),
    Case("window-sinks-both-masks", Window(3, 0, 2), (2, 60, 4, 16), kv_heads=2, key_mask=True, seq_lens=True),
    Case("longnet", LONGNET, (1, 256, 4, 16)),
    Case("longnet-causal", CAUSAL, (2, 256, 4, 16)),
    Case("longnet-ragged", LONGNET, (3, 201, 4, 16)),
    Case("longnet-ragged-causal", CAUSAL, (1, 201, 4, 16)),
    Case("longnet-short", CAUSAL, (2, 19, 4, 16)),
    Case("longnet-one-token", LONGNET, (2, 1, 4, 16)),
    Case("longnet-grouped", CAUSAL, (2, 150, 8, 8), kv_heads=2),
    Case("longnet-grouped-uneven", LONGNET, (1, 150, 6, 8), kv_heads=3),
    Case("longnet-odd-heads", CAUSAL, (1, 150, 5, 9)),
    Case("longnet-block-offsets", Dilated((32, 64), (2, 4), offsets="block"), (2, 70, 6, 16), kv_heads=2),
    Case("longnet-split", Dilated((16, 32, 64), (1, 2, 4), True, heads="split"), (2, 80, 7, 16)),
    Case("longnet-split-few-heads", Dilated((16, 32, 64), (1, 2, 4), heads="split"), (1, 70, 2, 16)),
    Case("segments-alone", Dilated((16,), (1,)), (2, 64, 2, 16)),
    Case("segments-alone-causal-grouped", Dilated((16,), (1,), True), (2, 64, 4, 16), kv_heads=2),
    Case("rate-not-dividing", Dilated((10, 35), (3, 4)), (2, 101, 4, 16)),
    Case("rate-not-dividing-causal", Dilated((10, 35), (3, 4), True), (2, 101, 4, 16)),
    Case("rate-over-segment", Dilated((3,), (8,), True), (1, 40, 8, 16)),
    Case("uncovered-rows", Dilated((16,), (4,)), (2, 70, 2, 16)),
    Case("same-branch-twice", Dilated((16, 16), (2, 2)), (1, 64, 2, 16)),
    Case("longnet-at-end", LONGNET, (1, 40, 4, 16), k_len=150),
    Case("longnet-at-end-causal", CAUSAL, (2, 40, 4, 8), k_len=150, kv_heads=2, key_mask=True),
    Case("longnet-one-query", CAUSAL, (2, 1, 4, 16), k_len=101, kv_heads=2),
    Case("longnet-split-at-end", Dilated((16, 32, 64), (1, 2, 4), True, heads="split"), (2, 20, 7, 16), k_len=90),
    Case("rate-not-dividing-at-end", Dilated((10, 35), (3, 4), True), (2, 33, 4, 16), k_len=101),
    Case("uncovered-rows-at-end", Dilated((16,), (4,)), (2, 23, 2, 16), k_len=70),
    Case("longnet-key-mask", CAUSAL, (2, 150, 4, 16), key_mask=True),
    Case("longnet-seq-lens", LONGNET, (3, 150, 4, 16), seq_lens=True),
    Case("longnet-both-masks", CAUSAL, (3, 150, 8, 16), kv_heads=4, key_mask=True, seq_lens=True),
    Case("longnet-heads-first", CAUSAL, (2, 150, 4, 16), strides=("bhnd", "bhnd", "bhnd")),
    Case("longnet-packed", CAUSAL, (2, 150, 4, 16), strides=("bnhd+gaps", "bnhd+gaps", "bhnd")),
    Case("longnet-head-dim-not-last", LONGNET, (2, 150, 4, 16), strides=("bnhd", "bndh", "bdnh")),
    Case("dense-head-dim-not-last", Dense(), (2, 50, 4, 16), strides=("bhdn", "bndh", "bdnh")),
    Case("dense-expanded", Dense(), (2, 50, 4, 16), strides=("bnhd", "bnd+expanded:h", "nhd+expanded:b")),
    Case("neighborhood-1d", Neighborhood((60,), (9,), dilation=(2,)), (1, 60, 2, 16)),
    Case("neighborhood-1d-causal", Neighborhood((60,), (9,), is_causal=(True,)), (1, 60, 2, 16)),
    Case("neighborhood-2d", Neighborhood((9, 7), (3, 5)), (2, 63, 2, 16)),
    Case("neighborhood-2d-shift", Neighborhood((9, 7), (3, 5), edges="shift"), (1, 63, 4, 16), kv_heads=2),
    Case("neighborhood-2d-mixed", Neighborhood((9, 8), (3, 3), (2, 1), (True, False), "shift"), (1, 72, 2, 16)),
    Case("neighborhood-3d", Neighborhood((4, 3, 5), (3, 3, 3)), (1, 60, 2, 16)),
    Case("neighborhood-even", Neighborhood((9, 8), (4, 6), edges="shift"), (1, 72, 4, 16), kv_heads=2),
    Case("neighborhood-1d-stride", Neighborhood((61,), (6,), (3,), edges="shift", stride=(4,)), (2, 61, 2, 16)),
    Case("neighborhood-1d-stride-causal", Neighborhood((62,), (7,), (3,), (True,), "shift", (3,)), (1, 62, 2, 16)),
    Case("neighborhood-stride-mixed", STRIDED, (2, 77, 4, 16), kv_heads=2, key_mask=True, seq_lens=True),
    Case("neighborhood-3d-stride", STRIDED_3D, (1, 120, 2, 16)),
    Case("neighborhood-stride-at-end", STRIDED_END, (2, 29, 4, 16), k_len=72, kv_heads=2, key_mask=True),
    Case("neighborhood-stride-at-end-causal", STRIDED_CAUSAL, (1, 30, 2, 16), k_len=72),
    Case("neighborhood-at-end", Neighborhood((6, 7), (3, 3)), (2, 9, 2, 16), k_len=42, key_mask=True),
    Case("neighborhood-at-end-causal", Neighborhood((9, 7), (5, 3), is_causal=(True, False)), (1, 17, 2, 16), k_len=63),
    Case("neighborhood-at-end-shift", Neighborhood((9, 8), (3, 3), (2, 1), edges="shift"), (1, 30, 2, 16), k_len=72),
    Case("neighborhood-one-query", Neighborhood((4, 3, 5), (3, 3, 3)), (2, 1, 4, 16), k_len=60, kv_heads=2),
    Case("neighborhood-key-mask", Neighborhood((6, 7), (3, 3)), (2, 42, 2, 16), key_mask=True, seq_lens=True),
)

#: Of patterns that hold tensors: their forms.
DATA_CASES = (
    Case("ranges", RangesForm(1, by_row=False, density=-2), (2, 77, 4, 16), kv_heads=2),
    Case("ranges-by-row", RangesForm(2, by_row=True, density=-4), (3, 61, 4, 16), kv_heads=2, key_mask=True),
    Case("ranges-few-queries", RangesForm(1, by_row=True), (2, 5, 4, 16), k_len=90, kv_heads=1),
    Case("blocks", BlocksForm((16, 16), "heads", False, False, Dense(), -2), (2, 101, 4, 16), kv_heads=2, seq_lens=True),
    Case("block-lists", BlocksForm((32, 16), "kv_heads", True, True, Window(40, 0), -2), (2, 90, 4, 16), kv_heads=2),
)

_PLAIN = next(case for case in CASES if case.id == "causal-both-masks")
_TRAINED = next(case for case in CASES if case.id == "dense-odd-head-dim")
#: What a call may ask for besides a pattern and masks.
_MORE: tuple[dict[str, Any], ...] = (
    {"dropout_p": 0.3},
    {"dropout_p": 0.3, "needs_grad": True},
    {"deterministic": True, "needs_grad": True},
    {"softcap": 2.0, "needs_grad": True},
    {"bias": (1, 1)},
    {"bias": (1, 1), "needs_grad": True, "bias_needs_grad": True},
    {"alibi_axes": 1, "needs_grad": True},
    {"ranks": 2},
)


def problems(device: torch.device | str = "cpu") -> list[Problem]:
    """What `attn_dispatch.testing.conformance` holds a backend to: every kind of pattern, mask, memory order and dtype.

    Each pattern is asked for as in inference, without lse; in training, with it; and once in another dtype than
    float32. Sizes are small and odd. A backend refuses what it does not compute.

    Args:
        device: on which the tensors lie.
    """
    where, found = normal_device(device), []
    for number, case in enumerate((*CASES, *DATA_CASES)):
        other = DTYPES[1:][number % 3]
        found += [
            replace(case.problem(torch.float32, needs_grad=False, device=where), return_lse=False),
            case.problem(torch.float32, needs_grad=True, device=where),
            case.problem(other, needs_grad=number % 2 == 0, device=where),
        ]
    for case in (_PLAIN, _TRAINED):
        plain = replace(case.problem(torch.float32, needs_grad=False, device=where), return_lse=False)
        found += [replace(plain, **more) for more in _MORE]
    return found
