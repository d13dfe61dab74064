"""Made-up attention libraries: the parameters of the real ones, what those insist on, and the formula for the rest.

They run on the CPU, so that what an adapter hands over and makes of the answer is held to float64 like any backend.
"""

# The parameters of other people's functions are given by name and order only.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

VECTOR_BYTES = 16
Grads = tuple[Tensor, Tensor, Tensor]


# --- the formula, [batch, len, heads, head_dim] -----------------------------------------------------------------------


def band(q: Tensor, k: Tensor, left: int, right: int, *, bottom_right: bool = True) -> Tensor:
    """Which keys a query sees, [q_len, k_len]; a side below 0 is open."""
    ahead = k.shape[1] - q.shape[1] if bottom_right else 0
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - ahead
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    return seen & (distance <= right) if right >= 0 else seen


def scores(q: Tensor, k: Tensor, scale: float | None, bias: Tensor) -> Tensor:
    """[batch, heads, q_len, k_len] in float64; `bias` is added."""
    assert scale is not None  # a library would take its own
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return scale * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) + bias.double()


def drawn(p: float, q: Tensor) -> Any:
    """Dropout factors of any number of keys up to 400, which stand for how a library drew them."""
    kept = torch.rand(q.shape[0], q.shape[2], q.shape[1], 400) >= p if p else torch.ones(1, dtype=torch.bool)
    return kept.double() / (1 - p)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor, empty: float, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out as q and lse [batch, heads, q_len] in float32; `empty` is the lse of a row that sees no key."""
    s = scores(q, k, scale, bias)
    lse = s.logsumexp(-1)
    p = (s - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    p = p if keep is None else p * keep[..., : p.shape[-1]]
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.double()).to(q.dtype)
    return out, lse.masked_fill(lse == -math.inf, empty).float()


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    bias: Tensor,
    grad_lse: Tensor | None = None,
    keep: Tensor | None = None,
) -> Grads:
    """As flash kernels do it: from the out and lse that are handed in, whatever they belong to."""
    group = q.shape[2] // k.shape[2]
    p = (scores(q, k, scale, bias) - lse.double().unsqueeze(-1)).exp()
    keys, values = (x.double().repeat_interleave(group, dim=2) for x in (k, v))
    delta = (grad.double() * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    delta = delta if grad_lse is None else delta - grad_lse.double().unsqueeze(-1)
    assert scale is not None
    factors = torch.ones(()) if keep is None else keep[..., : p.shape[-1]]
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", grad.double(), values) * factors - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, keys)
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", x, y.double()) for x, y in ((ds, q), (p * factors, grad)))
    dk, dv = (torch.unflatten(x, 2, (-1, group)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def as_bias(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


# --- what the kernels insist on ---------------------------------------------------------------------------------------


def check_rows(*tensors: Tensor, head_dim_of: int = 8) -> None:
    """Rows of neighbours that are whole vectors and start on one."""
    for x in tensors:
        assert x.ndim == 4
        assert x.shape[-1] % head_dim_of == 0
        assert x.stride(-1) == 1
        strides = [stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1]
        assert all(stride > 0 and stride * x.itemsize % VECTOR_BYTES == 0 for stride in strides)
        assert x.data_ptr() % VECTOR_BYTES == 0


def check_lse(lse: Tensor, q: Tensor) -> None:
    """[batch, heads, q_len] without gaps, for q [batch, q_len, heads, head_dim]."""
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert not bool((lse == -math.inf).any())  # exp(s - -inf) is no probability


def modules(monkeypatch: pytest.MonkeyPatch, **names: dict[str, Any]) -> None:
    """Put modules in place, dots written as double underscores."""
    for name, members in names.items():
        dotted = name.replace("__", ".")
        module = ModuleType(dotted)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, dotted, module)


# --- flash-attn -------------------------------------------------------------------------------------------------------


def flash_bias(
    q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None, ends: Tensor | None = None
) -> Tensor:
    """`ends` [batch]: how many keys each row has."""
    left, right = (-1 if side is None else side for side in (left, right))
    if ends is None:
        return as_bias(band(q, k, left, 0 if causal else right))
    assert (ends.dtype, ends.is_contiguous(), ends.shape) == (torch.int32, True, q.shape[:1])
    assert 0 <= int(ends.min()) <= int(ends.max()) <= k.shape[1]
    rows = [band(q, k[:, :end], left, 0 if causal else right) for end in ends.tolist()]
    return as_bias(torch.stack([torch.nn.functional.pad(row, (0, k.shape[1] - row.shape[1])) for row in rows]))[:, None]


def of_documents(q: Tensor, starts: Tensor, same_of_keys: Tensor, *longest: int) -> Tensor:
    """What hides other documents of q [tokens, heads, head_dim]."""
    lengths = starts.diff()
    assert same_of_keys.tolist() == starts.tolist() == sorted(starts.tolist())
    assert (starts.dtype, int(starts[0]), int(starts[-1])) == (torch.int32, 0, len(q))
    assert longest == (max(2, int(lengths.max())),) * 2
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return as_bias(ids[:, None] == ids)


def flash_attn_2(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], imported: str = "flash_attn_gpu"
) -> None:
    """flash-attn 2.7.0 to 2.8.3 (csrc/flash_attn/flash_api.cpp), by the name by which the package imports it."""

    def fwd(
        q, k, v, out_, alibi_slopes_, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, gen_, /,
    ):  # fmt: skip
        check_rows(q, k, v)
        assert (out_, alibi_slopes_, softcap, return_softmax, gen_) == (None, None, 0.0, False, None)
        bias = flash_bias(q, k, is_causal, window_size_left, window_size_right)
        rng_state = drawn(p_dropout, q)
        return *forward(q, k, v, softmax_scale, bias, math.inf, rng_state), None, rng_state

    def fwd_kvcache(
        q, kcache, vcache, k_, v_, seqlens_k_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_, block_table_,
        alibi_slopes_, out_, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        is_rotary_interleaved, num_splits, /,
    ):  # fmt: skip
        check_rows(q, kcache, vcache)
        unused = k_, v_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_, block_table_, alibi_slopes_, out_
        assert (*unused, softcap, is_rotary_interleaved, num_splits) == (*[None] * 9, 0.0, False, 0)
        bias = flash_bias(q, kcache, is_causal, window_size_left, window_size_right, seqlens_k_)
        # Values after a row's end are not read; scores there are replaced.
        after = torch.arange(kcache.shape[1]) >= seqlens_k_[:, None]
        v = vcache.masked_fill(after[:, :, None, None], 0.0)
        return forward(q, kcache.nan_to_num(0.0), v, softmax_scale, bias, math.inf)

    def bwd(
        dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, deterministic, gen_, rng_state, /,
    ):  # fmt: skip
        check_rows(dout, q, k, v, out, dq_, dk_, dv_)
        check_lse(softmax_lse, q)
        assert (alibi_slopes_, softcap, gen_, rng_state is None) == (None, 0.0, None, p_dropout == 0)
        calls.append({"deterministic": deterministic, "window": (window_size_left, window_size_right)})
        bias = flash_bias(q, k, is_causal, window_size_left, window_size_right)
        found = backward(dout, q, k, v, out, softmax_lse, softmax_scale, bias, None, rng_state)
        for into, grad in zip((dq_, dk_, dv_), found):
            into.copy_(grad)

    def varlen_fwd(
        q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, alibi_slopes_, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, gen_, /,
    ):  # fmt: skip
        row = q[None], k[None], v[None]
        check_rows(*row)
        assert (out_, seqused_k, leftpad_k_, block_table_, alibi_slopes_, gen_) == (None,) * 6
        assert (p_dropout, zero_tensors, softcap, return_softmax) == (0.0, False, 0.0, False)
        calls.append({"documents": len(cu_seqlens_q) - 1})
        bias = flash_bias(*row[:2], is_causal, window_size_left, window_size_right)
        bias = bias + of_documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = forward(*row, softmax_scale, bias, math.inf)
        return out[0], lse[0], None, None

    def varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, cu_seqlens_q, cu_seqlens_k, alibi_slopes_, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right, softcap,
        deterministic, gen_, rng_state, /,
    ):  # fmt: skip
        row = dout[None], q[None], k[None], v[None], out[None], softmax_lse[None]
        check_rows(*row[:5], dq_[None], dk_[None], dv_[None])
        check_lse(row[5], row[1])
        assert (alibi_slopes_, p_dropout, zero_tensors, softcap, gen_, rng_state) == (None, 0.0, False, 0.0, None, None)
        calls.append({"documents": len(cu_seqlens_q) - 1})
        bias = flash_bias(*row[1:3], is_causal, window_size_left, window_size_right)
        bias = bias + of_documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        for into, grad in zip((dq_, dk_, dv_), backward(*row, softmax_scale, bias)):
            into.copy_(grad[0])

    extension = _namespace(fwd, fwd_kvcache, bwd, varlen_fwd, varlen_bwd)
    modules(monkeypatch, flash_attn={}, flash_attn__flash_attn_interface={imported: extension})


class BlockSparseTensorsTorch(NamedTuple):
    """Of flash-attn-4 4.0.0b36, flash_attn/cute/block_sparsity.py."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def flash_blocks(q: Tensor, k: Tensor, sparse: BlockSparseTensorsTorch, tile_queries: int) -> Tensor:
    """0 for keys in a full block of their query's list, else -inf: as `normalize_block_sparse_config` checks lists, and
    the kernels go through them.
    """
    assert sparse.block_size is not None
    assert sparse.full_block_cnt is not None
    assert sparse.full_block_idx is not None
    (qb, kb), (batch, heads) = sparse.block_size, (q.shape[0], q.shape[2])
    assert (qb % tile_queries, kb) == (0, 128)
    sizes = -(-q.shape[1] // qb), -(-k.shape[1] // kb)
    assert not sparse.mask_block_cnt.any()  # there is no function that masks within a block
    counts, numbers = sparse.full_block_cnt, sparse.full_block_idx
    for count, number in ((sparse.mask_block_cnt, sparse.mask_block_idx), (counts, numbers)):
        assert (count.dtype, number.dtype, number.is_contiguous()) == (torch.int32, torch.int32, True)
        assert (count.shape[2], number.shape[:3], number.shape[3] <= sizes[1]) == (sizes[0], count.shape, True)
        assert count.shape[0] in (1, batch)
        assert count.shape[1] in (1, heads)
    listed = torch.arange(numbers.shape[3]) < counts[..., None]
    # The first block that is computed, the list's last, alone is cut at the last key.
    assert ((numbers.diff() > 0) | ~listed[..., 1:]).all()
    seen = torch.zeros(*counts.shape, sizes[1], dtype=torch.int32).scatter_add_(3, numbers.long(), listed.int())
    seen = seen.repeat_interleave(qb, 2)[:, :, : q.shape[1]].repeat_interleave(kb, 3)[..., : k.shape[1]]
    return torch.zeros(seen.shape).masked_fill(seen == 0, -math.inf)


def flash_attn_4(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> None:
    """flash-attn-4 4.0.0b36: `flash_attn.cute.interface`; the parameters past those that are used are left out."""

    def of_row(q: Tensor, lists: tuple[Any, ...]) -> Tensor:
        calls.append({"documents": len(lists[0]) - 1})
        return of_documents(q, *lists)

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, pack_gqa=None, block_sparse_tensors=None,
        return_lse=False,
    ):  # fmt: skip
        lists = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        more = 0.0 if cu_seqlens_q is None else of_row(q, lists)
        if block_sparse_tensors is not None:
            assert pack_gqa is False  # else lists are read by the places of packed heads
            calls.append({"blocks": block_sparse_tensors.block_size})
            more = flash_blocks(q, k, block_sparse_tensors, 256 if torch.cuda.get_device_capability()[0] > 9 else 128)
            k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)  # blocks in no list are not read
        q, k, v = (x if cu_seqlens_q is None else x[None] for x in (q, k, v))
        check_rows(q, k, v)
        assert return_lse
        bias = flash_bias(q, k, causal, window_size_left, window_size_right, seqused_k) + more
        k = k if seqused_k is None else k.nan_to_num(0.0)  # scores are replaced
        found = forward(q, k, v, softmax_scale, bias, -math.inf)
        return *(x if cu_seqlens_q is None else x[0] for x in found), None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, *, dlse=None,
    ):  # fmt: skip
        lists = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        more = 0.0 if cu_seqlens_q is None else of_row(q, lists)
        if cu_seqlens_q is not None:
            q, k, v, out, dout, lse = (x[None] for x in (q, k, v, out, dout, lse))
            dlse = None if dlse is None else dlse[None]
        check_rows(q, k, v, out, dout)
        check_lse(lse, q)
        if dlse is not None:
            assert (dlse.shape, dlse.dtype, dlse.stride(-1)) == (lse.shape, torch.float32, 1)
        calls.append({"deterministic": deterministic, "window": (window_size_left, window_size_right)})
        bias = flash_bias(q, k, causal, window_size_left, window_size_right) + more
        found = backward(dout, q, k, v, out, lse, softmax_scale, bias, dlse)
        return tuple(x if cu_seqlens_q is None else x[0] for x in found)

    interface = {f.__name__: f for f in (_flash_attn_fwd, _flash_attn_bwd, BlockSparseTensorsTorch)}
    modules(monkeypatch, flash_attn={}, flash_attn__cute={}, flash_attn__cute__interface=interface)


# The schemas that flash-attention's hopper folder registers.
FLASH_3_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASH_3_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@contextmanager
def flash_attn_3(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> Iterator[None]:
    """The ops of flash-attn 3."""

    def of_row(q: Tensor, given: SimpleNamespace) -> tuple[dict[str, Any], Any]:
        if (starts := given.cu_seqlens_q) is None:
            return {}, 0.0
        hidden = of_documents(q, starts, given.cu_seqlens_k, given.max_seqlen_q, given.max_seqlen_k)
        return {"documents": len(starts) - 1}, hidden

    def fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        given = _named(FLASH_3_FWD, q, k, v, *rest)
        documents, more = of_row(q, given)
        q, k, v = (x[None] if documents else x for x in (q, k, v))
        check_rows(q, k, v)
        calls.append({"num_splits": given.num_splits} | documents)
        window = given.window_size_left, given.window_size_right
        bias = flash_bias(q, k, given.is_causal, *window, given.seqused_k) + more
        k = k if given.seqused_k is None else k.nan_to_num(0.0)  # scores are replaced
        found = forward(q, k, v, given.softmax_scale, bias, -math.inf)
        return *(x[0] if documents else x for x in found), torch.empty(0), torch.empty(0)

    def bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        given = _named(FLASH_3_BWD, dout, q, k, v, out, lse, *rest)
        documents, more = of_row(q, given)
        tensors = dout, q, k, v, out, lse, given.dq, given.dk, given.dv
        dout, q, k, v, out, lse, *into = (x[None] if documents else x for x in tensors)
        check_rows(dout, q, k, v, out, *into)
        check_lse(lse, q)
        window = (given.window_size_left, given.window_size_right)
        calls.append({"deterministic": given.deterministic, "window": window} | documents)
        bias = flash_bias(q, k, given.is_causal, *window) + more
        found = backward(dout, q, k, v, out, lse, given.softmax_scale, bias)
        for each, grad in zip(into, found):
            each.copy_(grad)
        return tuple(torch.empty(0) for _ in range(5))

    modules(monkeypatch, flash_attn_3={}, flash_attn_3___C={})
    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        for schema, function in ((FLASH_3_FWD, fwd), (FLASH_3_BWD, bwd)):
            library.define(schema)
            library.impl(function.__name__, function, "CompositeExplicitAutograd")
        yield


def _named(schema: str, *values: Any) -> SimpleNamespace:
    """Arguments by their names: a kernel is called with all of them, in order, up to the last that was given."""
    arguments = torch._C.parse_schema(f"n::{schema}").arguments
    defaults = [argument.default_value for argument in arguments[len(values) :]]
    return SimpleNamespace(**{a.name: value for a, value in zip(arguments, [*values, *defaults])})


# --- xformers ---------------------------------------------------------------------------------------------------------


class LowerTriangularMask:
    """Lines up the first query with the first key."""


class BlockDiagonalMask:
    """Of a row's documents."""

    def __init__(self, lengths: Any, causal: bool = False) -> None:
        self.lengths, self.causal = lengths, causal

    @classmethod
    def from_seqlens(cls, q_seqlen: Any, kv_seqlen: Any = None, *, device: torch.device) -> BlockDiagonalMask:
        assert (kv_seqlen, device) == (None, torch.device("cpu"))
        return cls(q_seqlen)

    def make_causal(self) -> BlockDiagonalMask:
        return BlockDiagonalMask(self.lengths, True)


def xformers(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], ops_of: str = "xformers__ops") -> None:
    """xformers 0.0.35: `xformers.ops`; MSLK 1.3.0: `mslk.attention.fmha`. Their kernels may round the rows of lse
    up, and what is in them is anything.
    """

    def bias_of(attn_bias: object, q: Tensor, k: Tensor) -> Tensor:
        if attn_bias is None:
            return torch.zeros(())
        if isinstance(attn_bias, BlockDiagonalMask):
            assert (len(q), sum(attn_bias.lengths)) == (1, q.shape[1])
            calls.append({"documents": len(attn_bias.lengths)})
            starts = torch.tensor([0, *attn_bias.lengths]).cumsum(0, dtype=torch.int32)
            hidden = of_documents(q[0], starts, starts, *[max(2, *attn_bias.lengths)] * 2)
            return hidden + as_bias(band(q, k, -1, 0 if attn_bias.causal else -1))
        assert type(attn_bias) is LowerTriangularMask
        assert q.shape[1] == k.shape[1]  # the flash kernels have the other alignment
        return as_bias(band(q, k, -1, 0, bottom_right=False))

    def memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        check_rows(query, key, value)
        assert (p, op, output_dtype) == (0.0, None, None)
        assert query.shape[2] == key.shape[2]
        out, lse = forward(query, key, value, scale, bias_of(attn_bias, query, key), math.inf)
        padding = 0 if isinstance(attn_bias, BlockDiagonalMask) else -lse.shape[-1] % 32
        return out, torch.nn.functional.pad(lse, (0, padding), value=math.nan)

    def memory_efficient_attention_backward(
        grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None
    ):
        check_rows(grad, output, query, key, value)
        check_lse(lse, query)
        assert (p, op) == (0.0, None)
        assert output.is_contiguous()
        return backward(grad, query, key, value, output, lse, scale, bias_of(attn_bias, query, key))

    functions = (memory_efficient_attention_forward_requires_grad, memory_efficient_attention_backward)
    ops = {f.__name__: f for f in functions} | {"LowerTriangularMask": LowerTriangularMask}
    modules(monkeypatch, xformers={"_has_cpp_library": True}, mslk={}, mslk__attention={}, **{ops_of: ops})


# --- PyTorch's ops, [batch, heads, len, head_dim] ---------------------------------------------------------------------


OFFSET = torch.tensor(7)  #: of random numbers


def state_of(p: float, philox_seed: Tensor, philox_offset: Tensor) -> Tensor | None:
    """The factors that a forward pass drew."""
    assert (philox_offset is OFFSET) == (p > 0)
    return philox_seed if p else None


def _turned(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def cudnn_ops(stats_axes: int) -> SimpleNamespace:
    """cuDNN's attention as PyTorch calls it: plans are kept by what describes q, k and v, and by nothing else.

    Args:
        stats_axes: of lse: 3, or from PyTorch 2.9 on 4, the last of one entry.
    """
    plans: dict[Any, Any] = {}

    def check(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        check_rows(*_turned(query, key, value))
        assert query.shape[1] % key.shape[1] == 0
        assert key.shape[2] > 1
        return tuple((x.shape, x.stride()) for x in (query, key, value))

    def _scaled_dot_product_cudnn_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
        scale=None,
    ):  # fmt: skip
        check(query, key, value)
        assert (attn_bias, compute_log_sumexp, return_debug_mask) == (None, True, False)
        q, k, v = _turned(query, key, value)
        assert not is_causal or q.shape[1] == k.shape[1]
        seed = drawn(dropout_p, q)
        found, lse = forward(q, k, v, scale, flash_bias(q, k, is_causal, -1, -1), math.inf, seed)
        out = torch.empty_like(query).copy_(found.transpose(1, 2))
        lse = lse.unsqueeze(-1) if stats_axes == 4 else lse
        return out, lse, None, None, *query.shape[2:3], 0, seed, OFFSET, None

    def _scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        plan = (*check(query, key, value), is_causal)
        laid_out = (out.stride(), grad_out.stride(), logsumexp.stride())
        assert plans.setdefault(plan, laid_out) == laid_out
        assert (attn_bias, cum_seq_q, cum_seq_k) == (None, None, None)
        keep = state_of(dropout_p, philox_seed, philox_offset)
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert logsumexp.ndim == stats_axes
        grad, q, k, v, o = _turned(grad_out, query, key, value, out)
        check_rows(grad, o)
        lse = logsumexp.reshape(query.shape[:3])
        check_lse(lse, q)
        found = backward(grad, q, k, v, o, lse, scale, flash_bias(q, k, is_causal, -1, -1), None, keep)
        return tuple(_turned(*found))

    return _namespace(_scaled_dot_product_cudnn_attention, _scaled_dot_product_cudnn_attention_backward)


def flash_ops() -> SimpleNamespace:
    """PyTorch's flash attention."""

    def _scaled_dot_product_flash_attention(
        query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
    ):
        q, k, v = _turned(query, key, value)
        check_rows(q, k, v)
        assert return_debug_mask is False
        assert not is_causal or q.shape[1] == k.shape[1]
        seed = drawn(dropout_p, q)
        out, lse = forward(q, k, v, scale, flash_bias(q, k, is_causal, -1, -1), math.inf, seed)
        return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], seed, OFFSET, None

    def _scaled_dot_product_flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, *, scale=None,
    ):  # fmt: skip
        grad, q, k, v, o = _turned(grad_out, query, key, value, out)
        check_rows(grad, q, k, v, o)
        check_lse(logsumexp, q)
        assert (cum_seq_q, cum_seq_k) == (None, None)
        keep = state_of(dropout_p, philox_seed, philox_offset)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        found = backward(grad, q, k, v, o, logsumexp, scale, flash_bias(q, k, is_causal, -1, -1), None, keep)
        return tuple(_turned(*found))

    return _namespace(_scaled_dot_product_flash_attention, _scaled_dot_product_flash_attention_backward)


def efficient_ops() -> SimpleNamespace:
    """PyTorch's memory-efficient attention."""

    def bias_of(attn_bias: Tensor | None, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
        causal = as_bias(band(q, k, -1, 0 if is_causal else -1, bottom_right=False))
        if attn_bias is None:
            return causal
        assert attn_bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert attn_bias.dtype == q.dtype
        assert attn_bias.stride(-1) == 1
        assert all(stride * attn_bias.itemsize % VECTOR_BYTES == 0 for stride in attn_bias.stride()[:-1])
        assert attn_bias.data_ptr() % VECTOR_BYTES == 0
        return causal + attn_bias

    def _scaled_dot_product_efficient_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        q, k, v = _turned(query, key, value)
        check_rows(q, k, v)
        assert compute_log_sumexp is True
        seed = drawn(dropout_p, q)
        out, lse = forward(q, k, v, scale, bias_of(attn_bias, q, k, is_causal), math.inf, seed)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.nan)
        return out.transpose(1, 2), lse, seed, OFFSET

    def _scaled_dot_product_efficient_attention_backward(
        grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
        grad_input_mask, is_causal=False, *, scale=None,
    ):  # fmt: skip
        grad, q, k, v, o = _turned(grad_out_, query, key, value, out)
        check_rows(grad, q, k, v, o)
        assert o.is_contiguous()
        assert logsumexp.is_contiguous()
        assert logsumexp.shape[-1] % 32 == 0
        assert grad_input_mask == [True, True, True, False]
        keep = state_of(dropout_p, philox_seed, philox_offset)
        lse = logsumexp[:, :, : q.shape[1]].contiguous()
        check_lse(lse, q)
        found = backward(grad, q, k, v, o, lse, scale, bias_of(attn_bias, q, k, is_causal), None, keep)
        return *_turned(*found), None

    return _namespace(_scaled_dot_product_efficient_attention, _scaled_dot_product_efficient_attention_backward)


def _namespace(*functions: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**{f.__name__: f for f in functions})
