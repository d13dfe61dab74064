"""Triton backward kernels over runs or pairs of tiles (see `lists`): dq by query tiles, dk and dv by key tiles.

The gradient of out may have any strides. There are no atomic additions: results are deterministic. Importing this
module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.dropout import gains
from attn_dispatch.kernels.triton.lists import (
    VARIABLE,
    block_of,
    length_of,
    mask_of,
    member_of,
    phases_of,
    program_place,
    rows_of,
    sizes_of,
    span_of,
)
from attn_dispatch.kernels.triton.parts import (
    add_product,
    fold_scale,
    head_of,
    load_rows,
    row_sums,
    scores,
    store_rows,
    times_rows,
    weights,
    zeros,
)
from attn_dispatch.kernels.triton.terms import after_terms, head_terms


@triton.jit(do_not_specialize=VARIABLE)
def backward_q(
    tensors, lists, q_by, k_by, v_by, grad_by, heads, programs, together, q_len, k_len, low, high, terms, meta
):
    """dq as out, scaled_lse and delta [batch, heads, q_len]; rows are queries, columns keys."""
    q, k, v, out, grad, lse, grad_lse, scaled_lse, delta, dq, seq_lens, key_mask = tensors
    batch, head, kind, tile, end_tile = program_place(lists, heads, programs, together, meta)
    sizes = low, high, q_len, k_len
    if tile >= end_tile:
        return
    first, last, rows, stored, first_run, end_run = rows_of(lists, tile, q_len, 1, meta)
    length = length_of(seq_lens, batch)
    mask = mask_of(key_mask, batch, k_len)
    k_head = head_of(k, k_by, batch, head // meta.GROUP)
    v_head = head_of(v, v_by, batch, head // meta.GROUP)
    every = tl.full([1, 1], True, tl.int1)
    query = load_rows(head_of(q, q_by, batch, head), rows, every, q_by, meta)
    d_out = load_rows(head_of(grad, grad_by, batch, head), rows, every, grad_by, meta)
    query, slope = fold_scale(query, terms.scale)
    row_at = ((batch * q_len + rows) * heads + head)[:, None] * meta.HEAD_DIM
    scalar_at = (batch * heads + head) * q_len + rows
    row_lse, row_delta, has_keys = row_sums(
        out, d_out, lse, grad_lse, scaled_lse, delta, row_at, scalar_at, stored, meta
    )
    of_head = head_terms(terms, batch, head, heads, meta)
    acc = zeros(meta)
    for number in range(first_run, end_run):
        own = sizes
        if meta.SINKS:
            own = sizes_of(lists, number, sizes, False)
        run, phases = phases_of(lists, number, kind, first, last, q_len, length, own, meta)
        for phase in tl.static_range(1 if low is None and meta.TILE == 0 else 0, 2 if meta.TILE else 3):
            n_from, n_to = span_of(phases, phase)
            for n in range(n_from, n_to, 1 if meta.TILE else meta.COLUMNS):
                columns, there, visible, times, added = block_of(
                    lists, run, n, first, rows, kind, own, length, mask, of_head, phase, False, meta
                )
                seen = there[:, None]
                key = load_rows(k_head, columns, seen, k_by, meta)
                s, steep, capped = after_terms(scores(query, key, meta), slope, added, of_head, meta)
                s = tl.where(visible, s, float("-inf"))
                p = times * weights(s * steep - row_lse[:, None])
                value = load_rows(v_head, columns, seen, v_by, meta)
                dp = scores(d_out, value, meta)
                if meta.DROPS:
                    dp *= gains(rows, columns, of_head, False)
                ds = p * (dp - row_delta[:, None]) * capped
                acc = add_product(ds.to(key[0].dtype), key, acc, meta)
    store_rows(dq, row_at, times_rows(acc, terms.scale, has_keys), stored, meta)


@triton.jit(do_not_specialize=VARIABLE)
def backward_kv(
    tensors, lists, q_by, k_by, v_by, grad_by, heads, programs, together, q_len, k_len, low, high, terms, meta
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    q, k, v, grad, scaled_lse, delta, dk, dv, seq_lens, key_mask = tensors
    batch, head, kind, tile, end_tile = program_place(lists, heads, programs, together, meta)
    sizes = low, high, q_len, k_len
    if tile >= end_tile:
        return
    first, last, rows, stored, first_run, end_run = rows_of(lists, tile, k_len, meta.GROUP, meta)
    every = tl.full([1, 1], True, tl.int1)
    key = load_rows(head_of(k, k_by, batch, head), rows, every, k_by, meta)
    value = load_rows(head_of(v, v_by, batch, head), rows, every, v_by, meta)
    key, slope = fold_scale(key, terms.scale)
    length = length_of(seq_lens, batch)
    mask = mask_of(key_mask, batch, k_len)
    valid_key = stored
    if length is not None:
        valid_key = valid_key & (rows < length)
    if mask is not None:
        valid_key = valid_key & (tl.load(mask + rows) != 0)
    acc_k = zeros(meta)
    acc_v = zeros(meta)
    for number in range(first_run, end_run):
        member, member_kind = member_of(lists, number, kind, batch, head, heads, meta)
        query_head = head_of(q, q_by, batch, member)
        grad_head = head_of(grad, grad_by, batch, member)
        of_head = head_terms(terms, batch, member, heads * meta.GROUP, meta)
        scalars = (batch * heads * meta.GROUP + member) * q_len
        own = sizes
        if meta.SINKS:
            own = sizes_of(lists, number, sizes, True)
        run, phases = phases_of(lists, number, member_kind, first, last, k_len, length, own, meta)
        for phase in tl.static_range(1 if low is None and meta.TILE == 0 else 0, 2 if meta.TILE else 3):
            n_from, n_to = span_of(phases, phase)
            for n in range(n_from, n_to, 1 if meta.TILE else meta.COLUMNS):
                columns, there, visible, times, added = block_of(
                    lists, run, n, first, rows, member_kind, own, length, None, of_head, phase, True, meta
                )
                if (length is not None) or (mask is not None):
                    visible = visible & valid_key[:, None]
                seen = every
                if length is not None:
                    seen = there[:, None]
                query = load_rows(query_head, columns, seen, q_by, meta)
                s, steep, capped = after_terms(scores(key, query, meta), slope, added, of_head, meta)
                s = tl.where(visible, s, float("-inf"))
                # Repeated queries have weight exp2(s - inf) = 0.
                column_lse = tl.load(scaled_lse + scalars + columns, mask=there, other=float("inf"))
                p = times * weights(s * steep - column_lse[None, :])
                d_out = load_rows(grad_head, columns, seen, grad_by, meta)
                kept = p
                if meta.DROPS:
                    factors = gains(rows, columns, of_head, True)
                    kept = p * factors
                acc_v = add_product(kept.to(d_out[0].dtype), d_out, acc_v, meta)
                column_delta = tl.load(delta + scalars + columns, mask=there, other=0.0)
                dp = scores(value, d_out, meta)
                if meta.DROPS:
                    dp *= factors
                ds = p * (dp - column_delta[None, :]) * capped
                if meta.BIAS:
                    ds = tl.where(visible, ds, 0.0)
                acc_k = add_product(ds.to(query[0].dtype), query, acc_k, meta)
    row_at = ((batch * k_len + rows) * heads + head)[:, None] * meta.HEAD_DIM
    store_rows(dk, row_at, times_rows(acc_k, terms.scale, valid_key), stored, meta)
    store_rows(dv, row_at, times_rows(acc_v, 1.0, valid_key), stored, meta)
