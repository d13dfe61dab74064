"""Triton forward kernel over runs or pairs of tiles (see `lists`): one online softmax over all columns of a tile.

q, k and v may have any strides. Results are contiguous; sums are in float32. Importing this module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 1; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.lists import (
    VARIABLE,
    block_of,
    length_of,
    mask_of,
    phases_of,
    program_place,
    rows_of,
    sizes_of,
    span_of,
)
from attn_dispatch.kernels.triton.parts import fold_scale, forward_step, head_of, load_rows, store_rows, zeros
from attn_dispatch.kernels.triton.terms import LN_2, head_terms


@triton.jit(do_not_specialize=VARIABLE)
def forward(tensors, lists, q_by, k_by, v_by, heads, programs, together, q_len, k_len, low, high, terms, meta):
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; 0 and -inf where no keys are.

    Rows are queries, columns keys.
    """
    q, k, v, out, lse, seq_lens, key_mask = tensors
    batch, head, kind, tile, end_tile = program_place(lists, heads, programs, together, meta)
    sizes = low, high, q_len, k_len
    if tile >= end_tile:
        return
    first, last, rows, stored, first_run, end_run = rows_of(lists, tile, q_len, 1, meta)
    length = length_of(seq_lens, batch)
    mask = mask_of(key_mask, batch, k_len)
    q_head = head_of(q, q_by, batch, head)
    k_head = head_of(k, k_by, batch, head // meta.GROUP)
    v_head = head_of(v, v_by, batch, head // meta.GROUP)
    query = load_rows(q_head, rows, tl.full([1, 1], True, tl.int1), q_by, meta)
    query, slope = fold_scale(query, terms.scale)
    of_head = head_terms(terms, batch, head, heads, meta)
    row_max = tl.full([meta.ROWS], float("-inf"), tl.float32)
    total = tl.full([meta.ROWS], 0.0, tl.float32)
    acc = zeros(meta)
    for number in range(first_run, end_run):
        own = sizes
        if meta.SINKS:
            own = sizes_of(lists, number, sizes, False)
        run, phases = phases_of(lists, number, kind, first, last, q_len, length, own, meta)
        for phase in tl.static_range(1 if low is None and meta.TILE == 0 else 0, 2 if meta.TILE else 3):
            n_from, n_to = span_of(phases, phase)
            for n in range(n_from, n_to, 1 if meta.TILE else meta.COLUMNS):
                block = block_of(lists, run, n, first, rows, kind, own, length, mask, of_head, phase, False, meta)
                row_max, total, acc = forward_step(
                    query, rows, k_head, k_by, v_head, v_by, block, slope, of_head, row_max, total, acc, meta
                )
    has_keys = total != 0  # it may be NaN
    if length is not None:
        has_keys = has_keys & (rows < length)
    divisor = tl.where(has_keys, total, 1.0)
    row_at = ((batch * q_len + rows) * heads + head)[:, None] * meta.HEAD_DIM
    kept = has_keys[:, None]
    found = tl.where(kept, acc[0] / divisor[:, None], 0.0), tl.where(kept, acc[1] / divisor[:, None], 0.0)
    store_rows(out, row_at, found, stored, meta)
    result_lse = tl.where(has_keys, row_max * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + rows, result_lse, mask=stored)
