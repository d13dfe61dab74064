"""Triton forward kernels for few queries at the end of many keys: each program reads a part of the keys, once for all
heads that share them, and `join` adds the parts.

q, k and v may have any strides. Sums are in float32. Importing this module imports triton.

Source: Dao et al. 2023, Flash-Decoding for long-context inference; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.lists import block_of, mask_of
from attn_dispatch.kernels.triton.parts import fold_scale, forward_step, head_of, load_rows, store_rows, zeros
from attn_dispatch.kernels.triton.terms import LN_2, head_terms

SPLITS = tl.constexpr(16)  #: that are joined at a time
#: Arguments whose values do not change the machine code.
VARIABLE = ("kv_heads", "splits", "share", "q_len", "k_len", "first", "end", "low", "high")


@triton.jit(do_not_specialize=VARIABLE)
def part(tensors, q_by, k_by, v_by, kv_heads, splits, share, q_len, k_len, first, end, low, high, terms, meta):
    """Sums [batch, kv_heads, splits, ROWS, HEAD_DIM], maxima and totals [..., ROWS] of keys `first` to `end`.

    Rows are a key head's queries by its heads, those of one query side by side. A split has `share` keys. With
    key_lens [batch] that is for k_len keys: bounds move with a row's end, and its splits share what it has.
    """
    q, k, v, sums, maxima, totals, key_mask, key_lens = tensors
    program = tl.program_id(0)
    split = program % splits
    kv_head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    row = tl.arange(0, meta.ROWS)
    lane = tl.minimum(row, q_len * meta.GROUP - 1)  # the rest repeat the last one; a constant goes last (Triton 3.7)
    rows = lane // meta.GROUP
    heads = (kv_head * meta.GROUP + lane % meta.GROUP)[:, None]
    of_head = head_terms(terms, batch, heads, kv_heads * meta.GROUP, meta)
    query = load_rows(head_of(q, q_by, batch, heads), rows, tl.full([1, 1], True, tl.int1), q_by, meta)
    query, slope = fold_scale(query, terms.scale)
    k_head = head_of(k, k_by, batch, kv_head)
    v_head = head_of(v, v_by, batch, kv_head)
    mask = mask_of(key_mask, batch, k_len)
    row_max = tl.full([meta.ROWS], float("-inf"), tl.float32)
    total = tl.full([meta.ROWS], 0.0, tl.float32)
    acc = zeros(meta)
    if key_lens is not None:
        missing = k_len - tl.minimum(tl.maximum(tl.load(key_lens + batch), 0), k_len).to(tl.int32)
        first = tl.maximum(first - missing, 0)
        end -= missing
        k_len -= missing
        share = tl.cdiv(tl.cdiv(end - first, splits), meta.COLUMNS) * meta.COLUMNS
        if low is not None:
            low -= missing
        if high is not None:
            high -= missing
    start = first + split * share
    stop = tl.minimum(start + share, end)
    run, sizes = (0, 1, stop), (low, high, q_len, k_len)
    for n in range(start, stop, meta.COLUMNS):
        block = block_of(None, run, n, 0, rows, 0, sizes, None, mask, of_head, 0, False, meta)
        row_max, total, acc = forward_step(
            query, rows, k_head, k_by, v_head, v_by, block, slope, of_head, row_max, total, acc, meta
        )
    at = program.to(tl.int64) * meta.ROWS + row
    tl.store(maxima + at, row_max)
    tl.store(totals + at, total)
    store_rows(sums, at[:, None] * meta.HEAD_DIM, acc, row < meta.ROWS, meta)


@triton.jit(do_not_specialize=("heads", "splits", "q_len"))
def join(tensors, heads, splits, q_len, meta):
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len], a program for each row; SPLITS at a time."""
    sums, maxima, totals, out, lse = tensors
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    query = program // heads % q_len
    batch = program // heads // q_len
    first = (batch * (heads // meta.GROUP) + head // meta.GROUP) * splits
    d = tl.arange(0, meta.BLOCK_D)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    result = tl.full([meta.BLOCK_D], 0.0, tl.float32)
    for n in range(0, splits, SPLITS):
        split = n + tl.arange(0, SPLITS)
        at = (first + tl.minimum(split, splits - 1)) * meta.ROWS + query * meta.GROUP + head % meta.GROUP
        maximum = tl.where(split < splits, tl.load(maxima + at), float("-inf"))
        new_most = tl.maximum(most, tl.max(maximum, 0))
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        weight = tl.exp2(maximum - safe)
        shrink = tl.exp2(most - safe)
        mask = (d < meta.HEAD_DIM)[None, :]
        parts = tl.load(sums + at[:, None] * meta.HEAD_DIM + d[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(weight * tl.load(totals + at), 0)
        result = result * shrink + tl.sum(weight[:, None] * parts, 0)
        most = new_most
    has_keys = total != 0  # it may be NaN
    divisor = tl.where(has_keys, total, 1.0)
    result = tl.where(has_keys, result / divisor, 0.0).to(out.dtype.element_ty)
    tl.store(out + program * meta.HEAD_DIM + d, result, mask=d < meta.HEAD_DIM)
    result_lse = tl.where(has_keys, most * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + query + tl.arange(0, 1), result_lse)
