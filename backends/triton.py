"""One fused Triton kernel for Dense, Window and Dilated: all branches of a tile of queries in one online softmax.

Nothing is gathered, merged or widened in memory; beyond the results there are lse, one more sum per query, and the
lists of tiles. Which queries and keys meet is worked out in `visits`, the orders of visits in `launches`; the kernels
are in `triton_kernels` and `triton_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.autograd import Call, recorded
from attn_dispatch.kernels.contract import Refusal, refuse_sinks
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.launch_order import Chip, launches_bytes, launches_of, offered
from attn_dispatch.kernels.triton.support import (
    SMALLEST_SIDE,
    Block,
    Pass,
    block_d,
    cut,
    fitting,
    float32,
    given,
    launch,
    passes_of,
    power_of_two,
    precision,
)
from attn_dispatch.kernels.triton.work_list import Side, Visits, covers, largest_cell, visits_bytes, visits_of
from attn_dispatch.spec.orders import NATURAL, VISIT_ORDERS
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib

name = "triton"
all_orders = (NATURAL, *VISIT_ORDERS)

LIST_LIMIT = 2**30  #: bytes of lists; past this tiles are so many that they must be nearly empty
BUILDING = 8  #: 64-bit temporaries for one list
LEAST_L2 = 2**21  #: bytes, on devices from capability 8.0 on; for releases of torch that do not tell

FORWARD, BACKWARD_Q, BACKWARD_KV = passes_of("forward", "backward")
INTERPRETED = Block(64, 64, 4, 1)
INTERPRETED_CHIP = Chip(2**14, 1)  #: so small that what depends on a chip's size shows in small problems


def version() -> str:
    return support.version()


def refusals(problem: Problem) -> list[Refusal]:
    found = support.refusals(problem, (Dense, Window, Dilated)) + refuse_sinks(problem)
    if not found and (needed := _list_bytes(problem)) > LIST_LIMIT:
        text = f"lists the tiles of {problem.pattern} in up to {gib(needed)}, over {gib(LIST_LIMIT)}"
        found.append(Refusal("over_memory", text))
    return found


def workspace_bytes(problem: Problem) -> int:
    # lse; then delta, and the gradient of lse made contiguous.
    sums = (3 if problem.needs_grad else 1) * problem.batch * problem.heads * problem.q_len * 4
    sums += copied_bytes(problem, masked_keys=False, padding=False)
    launched = {(each.side, block) for each in _passes(problem) for block in _fitting(each, problem)}
    lists = _list_bytes(problem) + sum(launches_bytes(problem, side, block.rows) for side, block in launched)
    return sums + lists * (BUILDING if problem.device.type == "cpu" else 1)


def flops(problem: Problem) -> int:
    total = 0
    for each in _passes(problem):
        block = blocks(each, problem)[0]
        total += _listed(problem, each.side, block.rows).pairs(block.rows, block.columns) * each.products
    return total * problem.batch * problem.head_dim * 2


def orders(problem: Problem) -> tuple[str, ...]:
    """Of visits: the others make no difference here, or less than the natural one."""
    return offered(problem, _chip(problem.device), -(-problem.q_len // blocks(FORWARD, problem)[0].rows))


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = NATURAL, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    if order not in all_orders:
        raise InvalidInput(f"triton runs in one of {', '.join(map(repr, all_orders))}, not {order!r}")
    key_mask = tensors.get("key_mask")
    kernels = _Call(problem, order, tensors.get("seq_lens"), None if key_mask is None else key_mask.view(torch.uint8))
    call = Hidden.of(problem).around(kernels)
    if problem.needs_grad:
        return recorded(q, k, v, call)
    return call.forward(q, k, v)


def partial(problem: Problem, key_mask: Tensor | None = None) -> Call:
    """The passes of queries that see keys elsewhere too (see `contract`)."""
    kernels = _Call(problem, NATURAL, None, None if key_mask is None else key_mask.view(torch.uint8))
    return Hidden.of(problem).around(kernels)


def release() -> None:
    """Drop the lists."""
    for cached in (_on_device, _launched, _listed):
        cached.cache_clear()


@lru_cache(maxsize=4096)
def blocks(each: Pass, problem: Problem) -> tuple[Block, ...]:
    """The blocks to try, the preferred first: those that fit into shared memory, cut to the largest cell."""
    most = max(SMALLEST_SIDE, power_of_two(largest_cell(problem, each.side)))
    return tuple(dict.fromkeys(cut(block, most) for block in _fitting(each, problem)))


def _fitting(each: Pass, problem: Problem) -> tuple[Block, ...]:
    return (INTERPRETED,) if problem.device.type == "cpu" else fitting(each, problem)


@dataclass(frozen=True, slots=True)
class _Call:
    """A problem with its masks; `key_mask` is uint8, 0 where a key is taken away."""

    problem: Problem
    order: str
    seq_lens: Tensor | None
    key_mask: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, self)

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(grad, grad_lse, saved, self)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    problem = call.problem
    (out,) = _results("queries", problem, q)
    lse = torch.full((problem.batch, problem.heads, problem.q_len), -math.inf, dtype=torch.float32, device=q.device)
    _launch(FORWARD, call, (q, k, v, out, lse), (q, k, v))
    return out, lse


def _backward(
    grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...], call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    grad, grad_lse = given(grad, out), None if grad_lse is None else grad_lse.contiguous()
    (dq,), (dk, dv) = _results("queries", call.problem, q), _results("keys", call.problem, k, v)
    delta = torch.empty_like(lse)
    strided = (q, k, v, grad)
    tensors = (q, k, v, out, grad, lse, grad_lse, delta, dq)
    _launch(BACKWARD_Q, call, tensors, strided, GRAD_LSE=grad_lse is not None)
    _launch(BACKWARD_KV, call, (q, k, v, grad, lse, delta, dk, dv), strided)
    return dq, dk, dv


def _results(side: Side, problem: Problem, *like: Tensor) -> list[Tensor]:
    """Contiguous tensors of these shapes; zeros where some rows are in no tile."""
    new = torch.empty if covers(problem, side) else torch.zeros
    return [new(x.shape, dtype=x.dtype, device=x.device) for x in like]


def _launch(
    each: Pass, call: _Call, tensors: Sequence[Tensor | None], strided: Sequence[Tensor], **constants: bool
) -> None:
    """Run a kernel with the first block that fits."""

    def start(block: Block) -> None:
        _launch_block(each, block, call, tensors, strided, constants)

    launch(each.kernel, blocks(each, call.problem), call.problem.device, start)


def _launch_block(
    each: Pass,
    block: Block,
    call: _Call,
    tensors: Sequence[Tensor | None],
    strided: Sequence[Tensor],
    constants: dict[str, bool],
) -> None:
    problem, mask = call.problem, call.key_mask
    kernel, visits = each.load(), _on_device(problem, each.side, block.rows)
    heads = problem.heads if each.side == "queries" else problem.kv_heads
    launches = None if call.order == NATURAL else _launched(problem, each.side, block, call.order)
    programs, repeated = (visits.most_tiles, heads) if launches is None else (len(launches), 1)
    if programs * repeated * problem.batch == 0:
        return
    kernel[(programs * repeated * problem.batch,)](
        *tensors,
        call.seq_lens,
        mask,
        visits.tiles,
        visits.runs,
        visits.first_tile,
        visits.kind_of,
        launches,
        *(stride for x in strided for stride in x.stride()),
        *((0, 0) if mask is None else mask.stride()),
        heads,
        programs,
        problem.q_len,
        problem.k_len,
        visits.low or 0,
        visits.high or 0,
        float32(problem.scale),
        GROUP=problem.heads // problem.kv_heads,
        HEAD_DIM=problem.head_dim,
        BLOCK_D=block_d(problem),
        ROWS=block.rows,
        COLUMNS=block.columns,
        LOW=visits.low is not None,
        HIGH=visits.high is not None,
        SEQ_LENS=call.seq_lens is not None,
        KEY_MASK=mask is not None,
        PRECISION=precision(problem),
        LISTED=launches is not None,
        num_warps=block.warps,
        num_stages=block.stages,
        **constants,
    )


@lru_cache(maxsize=64)
def _listed(problem: Problem, side: Side, rows: int) -> Visits:
    return visits_of(problem, side, rows)


@lru_cache(maxsize=64)
def _on_device(problem: Problem, side: Side, rows: int) -> Visits:
    return _listed(problem, side, rows).to(problem.device)


@lru_cache(maxsize=64)
def _launched(problem: Problem, side: Side, block: Block, order: str) -> Tensor:
    visits = _listed(problem, side, block.rows)
    return launches_of(problem, side, visits, order, _chip(problem.device), block.warps).to(problem.device)


def _list_bytes(problem: Problem) -> int:
    # Blocks that are cut down to the largest cell make no more tiles than there are cells.
    lists = {(each.side, block.rows) for each in _passes(problem) for block in _fitting(each, problem)}
    return sum(visits_bytes(problem, side, rows) for side, rows in lists)


def _passes(problem: Problem) -> tuple[Pass, ...]:
    return (FORWARD, BACKWARD_Q, BACKWARD_KV) if problem.needs_grad else (FORWARD,)


def _chip(device: torch.device) -> Chip:
    if device.type == "cpu":
        return INTERPRETED_CHIP
    properties = torch.cuda.get_device_properties(device)
    return Chip(int(getattr(properties, "L2_cache_size", LEAST_L2)), int(properties.multi_processor_count))
