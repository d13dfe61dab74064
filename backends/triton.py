"""Fused Triton kernels for Dense, Window and Dilated: one online softmax over all branches of a tile of queries.

Nothing is gathered, merged or converted in memory; besides results there are lse, one more sum per query, and lists of
tiles. In `kernels/triton`, `work_list` computes the tiles, and `forward` and `backward` are the kernels. Of few
queries at the end of longer keys, `few_queries` reads the keys in parts, as many as keep the device busy, and once for
all heads that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.kernels.autograd import Passes, differentiable, refuse_tangents
from attn_dispatch.kernels.contract import Refusal, Result
from attn_dispatch.kernels.device_cache import DeviceCache, bytes_of, is_noted, note, refuse_capture
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.triton import passes, support
from attn_dispatch.kernels.triton.blocks import SMALLEST_SIDE, BlockConfig, clipped, next_power_of_two
from attn_dispatch.kernels.triton.passes import Lists, Tables, TritonPasses
from attn_dispatch.kernels.triton.support import (
    NOTHING,
    Given,
    Launch,
    Meta,
    Terms,
    TritonKernel,
    fitting_blocks,
    kernels_of,
    launch,
    needed,
)
from attn_dispatch.kernels.triton.work_list import (
    KeyParts,
    Side,
    WorkList,
    covers,
    heads_in_turn,
    key_parts,
    largest_row_group,
    work_list_bytes,
    work_list_of,
)
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib

name, version = "triton", support.version
score_terms = ("softcap", "bias", "alibi_slopes")
shares_builds = specialized_trains = True

LIST_LIMIT = 2**30  #: bytes of lists; with more tiles, tiles would be almost empty
BUILDING = 64  #: times a list: temporaries while it is built, which count on a CPU (by the interpreter) alone
LEAST_L2 = 2**21  #: bytes, on devices from capability 8.0 on; for torch versions that do not report it

FORWARD, BACKWARD_Q, BACKWARD_KV = KERNELS = kernels_of()
INTERPRETED_CACHE = 2**14  #: bytes, so few that cache limits matter in small problems


def refusals(problem: Problem) -> list[Refusal]:
    found = support.refusals(problem, (Dense, Window, Dilated))
    if not found and (needed := _list_bytes(problem)) > LIST_LIMIT:
        text = f"lists the tiles of {problem.pattern} in up to {gib(needed)}, over {gib(LIST_LIMIT)}"
        found.append(Refusal("over_memory", text))
    return found


def workspace_bytes(problem: Problem) -> int:
    sums = support.bytes_beside_lists(problem) + copied_bytes(problem, masked_keys=False, padding=False)
    if (parts := key_parts(problem)) is not None:
        sums += 4 * problem.batch * problem.kv_heads * parts.parts * parts.rows * (problem.head_dim + 2)
    return sums + _list_bytes(problem) * (BUILDING if problem.device.type == "cpu" else 1)


def flops(problem: Problem) -> int:
    total = 0
    for each in needed(KERNELS, problem):
        block = block_configs(each, problem)[0]
        total += _listed(_on_cpu(problem), each.side, block.rows).pairs(block.rows, block.columns) * each.products
    return total * problem.batch * problem.head_dim * 2


def first_call_ms(problem: Problem) -> float:
    return support.first_call_ms(name, problem, _blocks(problem))


def configuration(problem: Problem) -> str:
    """The blocks of the problem's kernels."""
    return "; ".join(f"{each.kernel} {block_configs(each, problem)[0]}" for each in needed(KERNELS, problem))


def takes_key_lens(problem: Problem) -> bool:
    return key_parts(problem) is not None and not problem.needs_grad and not problem.dropout_p


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, key_lens: Any = None, **tensors: Tensor) -> Result:
    refuse_tangents(name, q, k, v, *tensors.values())
    given = Given.of(problem, tensors)
    if key_lens is not None:  # no key is read that no query sees
        return replace(_passes(problem, given), key_lens=key_lens.contiguous()).forward(q, k, v)
    call = Hidden.of(problem).around(_passes(problem, given))
    found = differentiable(q, k, v, call, given) if problem.needs_grad else call.forward(q, k, v)
    note(name, problem, _blocks(problem))
    return found


def takes_documents(problem: Problem) -> bool:
    return not getattr(problem.pattern, "sinks", 0)  # each has keys of its own that all see


def run_documents(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...], **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    refuse_tangents(name, q, k, v, *tensors.values())
    given, call = Given.of(problem, tensors), _documents(problem, lengths)  # not `Hidden`: no other's key is read
    if tensors or problem.dropout_p:
        call = replace(call, given=given, known=None)
    return differentiable(q, k, v, call, given) if problem.needs_grad else call.forward(q, k, v)


def specialized(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False
) -> Callable[..., Result] | None:
    return None if heads_first else passes.specialized(name, problem, _passes(problem, known={}), _list_bytes(problem))


def partial(problem: Problem, key_mask: Tensor | None = None) -> Passes:
    """The passes for queries that also see other keys (see `contract.Backend`)."""
    return Hidden.of(problem).around(
        _passes(problem, Given.of(problem, {} if key_mask is None else {"key_mask": key_mask}))
    )


def forget(problem: Problem) -> None:
    _on_device.forget(problem)
    _listed.forget(_on_cpu(problem))


@lru_cache(maxsize=4096)
def block_configs(each: TritonKernel, problem: Problem, lengths: tuple[int, ...] = ()) -> tuple[BlockConfig, ...]:
    """The blocks that fit into shared memory, in order of preference, clipped to the largest row group."""
    most = max(SMALLEST_SIDE, next_power_of_two(largest_row_group(problem, each.side, lengths)))
    return tuple(dict.fromkeys(clipped(block, most) for block in fitting_blocks(each, problem)))


@lru_cache(maxsize=4096)
def _blocks(problem: Problem) -> str:
    """The blocks of all kernels, as a text: it keeps its hash, which every call needs."""
    return repr([block_configs(each, problem) for each in needed(KERNELS, problem)])


process_state.register(process_state.READ, block_configs.cache_clear, _blocks.cache_clear)


def _passes(problem: Problem, given: Given = NOTHING, known: Any = None, lengths: tuple[int, ...] = ()) -> TritonPasses:
    kind = TritonPasses if problem.has_seq_lens or key_parts(problem) is None else _InParts
    every = covers(problem, "queries", lengths), not problem.needs_grad or covers(problem, "keys", lengths)
    blocks, lists = (lambda each: block_configs(each, problem, lengths)), (lambda *x: _lists(problem, lengths, *x))
    return kind(problem, KERNELS, blocks, lists, given, *every, known)


class _InParts(TritonPasses):
    """The passes of few queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem, parts, device = self.problem, key_parts(self.problem), q.device
        assert parts is not None
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        rows = problem.batch * problem.kv_heads * parts.parts * parts.rows
        maxima, totals = torch.empty(2, rows, dtype=torch.float32, device=device)
        sums = torch.empty(rows, problem.head_dim, dtype=torch.float32, device=device)
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
        lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32, device=device)
        tensors = q, k, v, sums, maxima, totals, self.given.key_mask, self.key_lens
        self.launch_as_known(_launch_part, parts, tensors, (q, k, v))
        self.launch_as_known(_launch_join, "join", (sums, maxima, totals, out, lse), (out,))
        return out, lse


def _launch_part(
    call: TritonPasses, parts: KeyParts, tensors: Sequence[Tensor | None], strided: Sequence[Tensor]
) -> Launch:
    from attn_dispatch.kernels.triton import few_queries  # imports triton

    problem = call.problem
    if not is_noted(name, problem, (parts.rows, getattr(call.key_lens, "dtype", None))):
        refuse_capture(problem.device)
    sizes = problem.kv_heads, parts.parts, parts.share, problem.q_len, problem.k_len
    keys = parts.first, parts.end, parts.low, parts.high
    others = (*(x.stride() for x in strided), *sizes, *keys, Terms.of(problem, call.given))
    meta = Meta.of(problem, parts.rows, parts.columns, strided, call.given.bias)
    programs = problem.batch * problem.kv_heads * parts.parts
    return launch(few_queries.part, programs, problem.device, tensors, others, meta, _warps(parts), 2)


def _launch_join(
    call: TritonPasses, kernel: str, tensors: Sequence[Tensor | None], strided: Sequence[Tensor]
) -> Launch:
    from attn_dispatch.kernels.triton import few_queries  # imports triton

    problem, parts = call.problem, key_parts(call.problem)
    assert parts is not None
    programs, others = problem.batch * problem.q_len * problem.heads, (problem.heads, parts.parts, problem.q_len)
    meta = Meta.of(problem, parts.rows, 0, (), None)._replace(SOFTCAP=False, BIAS=False, ALIBI=False, DROPS=False)
    found = launch(few_queries.join, programs, problem.device, tensors, others, meta, _warps(parts))
    note(name, problem, (parts.rows, getattr(call.key_lens, "dtype", None)))
    return found


def _warps(parts: KeyParts) -> int:
    return 8 if parts.rows > 32 else 4


def _lists(problem: Problem, lengths: tuple[int, ...], each: TritonKernel, block: BlockConfig) -> Lists:
    work = (_work_of if lengths else _on_device)(problem, each.side, block, lengths)
    tables = Tables(work.tiles, work.runs, work.first_tile, work.kind_of)
    return Lists(work.most_tiles, _in_turn(problem, each.side)[0], tables, work.bounds)


_listed = DeviceCache(work_list_of)


def _on_cpu(problem: Problem) -> Problem:
    return replace(problem, device=torch.device("cpu"))


def _work_of(problem: Problem, side: Side, block: BlockConfig, lengths: tuple[int, ...] = ()) -> WorkList:
    on_cpu = _on_cpu(problem)
    work = work_list_of(on_cpu, side, block.rows, lengths) if lengths else _listed(on_cpu, side, block.rows)
    if _in_turn(problem, side)[1]:
        work = work.longest_first(block.columns)
    return work.to(problem.device)


_on_device = DeviceCache(_work_of)


def _passes_of(problem: Problem, lengths: tuple[int, ...]) -> TritonPasses:
    """The passes for packed rows, with all lists: one made in a backward pass would wait for the device there."""
    found = _passes(problem, known={} if problem.device.type == "cuda" else None, lengths=lengths)
    found = replace(found, lists=cache(found.lists))
    for each in needed(KERNELS, problem):
        found.lists(each, found.blocks(each)[0])
    return found


def _list_sizes(found: TritonPasses) -> int:
    return sum(bytes_of(found.lists(each, found.blocks(each)[0])) for each in needed(KERNELS, found.problem))


_documents = DeviceCache(_passes_of, size=_list_sizes, most=64)  #: a training step has new lengths


@lru_cache(maxsize=4096)
def _in_turn(problem: Problem, side: Side) -> tuple[int, bool]:
    return heads_in_turn(problem, side, _l2_bytes(problem.device))


def _list_bytes(problem: Problem) -> int:
    # Blocks clipped to the largest row group make no more tiles than there are row groups.
    lists = {(each.side, block.rows) for each in needed(KERNELS, problem) for block in fitting_blocks(each, problem)}
    return sum(work_list_bytes(problem, side, rows) for side, rows in lists)


def _l2_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_CACHE
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", LEAST_L2))
