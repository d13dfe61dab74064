"""PyTorch's FlexAttention: one fused kernel, compiled for each problem, that skips the blocks a pattern leaves empty.

Source: Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels.
"""

from __future__ import annotations

import importlib.util
import math
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import once
from attn_dispatch.kernels.contract import (
    Refusal,
    refuse_device,
    refuse_dropout,
    refuse_dtype,
    refuse_pattern,
    refuse_ranks,
)
from attn_dispatch.kernels.flex import machine
from attn_dispatch.kernels.flex.blocks import blocks_of, heads_apart
from attn_dispatch.kernels.flex.mask import count_of, repeats
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.orders import NATURAL, ORDERS, permutation, places, serves
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reordered import Reordered, kept_in
from attn_dispatch.text import gib

name = "flex"

BLOCK = 128  #: tokens per side of a block; every kernel configuration divides it
TABLE_LIMIT = 2**30  #: bytes of block tables, held at once
MOST_KEPT = 64  #: compiled problems, held at once
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_RELEASE = (2, 13)  #: of torch; what its CPU kernel does was not tried with older ones
CUDA_HEAD_DIM = 16  #: the least that the matrix units take
CUDA_CAPABILITY = (7, 0)  #: the least that Triton compiles for
CPU_COMPILE_MS = 15_000.0  #: of a C++ kernel
CUDA_COMPILE_MS = 10_000.0  #: of a Triton kernel
#: Pairs of all heads that are gone through for the blocks of dilated segments in residue order.
PAIRS_LIMIT = 2**31
PATTERNS = (Dense, Window, Dilated, Neighborhood, Reordered)
SPLITS = 1024  #: most pieces that few queries' keys are cut into, so that they occupy a whole GPU

#: False only in tests: then the same functions run uncompiled, on whole score matrices, with gradients and lse on every
#: device, which holds their arithmetic to the definition without a compiler.
compiling = True

_kept: OrderedDict[tuple[Problem, str], _Attention] = OrderedDict()
_lock = threading.Lock()


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    found = refuse_ranks(problem) + refuse_dropout(problem) + refuse_device(problem, ("cpu", "cuda"))
    unknown = refuse_pattern(problem, PATTERNS)
    if unknown:  # nothing below can count it
        return found + unknown
    if not _countable(problem) and kept_in(problem.pattern) != NATURAL:
        found.append(Refusal("pattern", f"{problem.pattern} has over {PAIRS_LIMIT} pairs to look for blocks in"))
    needed = table_bytes(problem)
    if needed > TABLE_LIMIT:
        text = f"{problem.pattern} needs block tables of {gib(needed)}, over {gib(TABLE_LIMIT)}"
        found.append(Refusal("over_memory", text))
    if not compiling:
        return found
    found += refuse_dtype(problem, DTYPES)
    if problem.device.type == "cpu":
        return found + _refuse_cpu(problem)
    return found + (_refuse_cuda(problem) if problem.device.type == "cuda" else [])


def orders(problem: Problem) -> tuple[str, ...]:
    """Those in which blocks may be fewer."""
    few = _countable(problem)
    found = [each for each in ORDERS if few and serves(each, problem.pattern) and each != NATURAL]
    return (NATURAL, *(each for each in found if table_bytes(problem, each) <= TABLE_LIMIT))


def _countable(problem: Problem) -> bool:
    """Whether the blocks can be found where tokens are not in their natural order."""
    pairs = problem.heads * problem.q_len * problem.k_len
    return isinstance(problem.pattern.natural, Neighborhood) or pairs <= PAIRS_LIMIT


def _refuse_cpu(problem: Problem) -> list[Refusal]:
    found = []
    if problem.needs_grad:
        found.append(Refusal("gradient", "its CPU kernel has no backward"))
    if problem.return_lse:
        found.append(Refusal("lse", "its CPU kernel gives no lse"))
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < CPU_RELEASE:
        needed = ".".join(map(str, CPU_RELEASE))
        found.append(Refusal("release", f"its CPU kernel is used with torch {needed} and newer, not {version()}"))
    return [*found, *machine.refusals()]


def _refuse_cuda(problem: Problem) -> list[Refusal]:
    found = []
    if problem.head_dim < CUDA_HEAD_DIM:
        found.append(Refusal("head_dim", f"needs head_dim >= {CUDA_HEAD_DIM} on CUDA, not {problem.head_dim}"))
    if importlib.util.find_spec("triton") is None:
        found.append(Refusal("not_installed", "package triton is not installed (pip install 'attn-dispatch[triton]')"))
    capability = torch.cuda.get_device_capability(problem.device)
    if torch.version.hip is None and capability < CUDA_CAPABILITY:
        least, have = (".".join(map(str, each)) for each in (CUDA_CAPABILITY, capability))
        found.append(Refusal("capability", f"Triton needs compute capability {least}, this device has {have}"))
    return found


def table_bytes(problem: Problem, order: str = NATURAL) -> int:
    """Bytes of the block tables: two for the queries' and two for the keys' side, int32."""
    if _unmasked(problem):
        return 0
    entries = -(-problem.q_len // BLOCK) * -(-problem.k_len // BLOCK)
    moved = order != NATURAL or kept_in(problem.pattern) != NATURAL
    return 16 * heads_apart(problem.pattern.natural, problem.heads, BLOCK, moved) * entries


def flops(problem: Problem) -> int:
    """Every pair of the blocks that it visits."""
    blocks = _visited(problem.pattern, problem.q_len, problem.k_len, problem.heads, problem.device)
    return problem.batch * blocks * BLOCK**2 * problem.head_dim * (14 if problem.needs_grad else 4)


@lru_cache(maxsize=4096)
def _visited(pattern: Pattern, q_len: int, k_len: int, heads: int, device: torch.device) -> int:
    """Blocks of all heads."""
    kept = permutation(kept_in(pattern), pattern.natural, q_len)
    some = blocks_of(pattern.natural, q_len, k_len, heads, BLOCK, device, kept).some
    return int(some.sum()) * (heads // len(some))


def workspace_bytes(problem: Problem) -> int:
    rows = problem.batch * problem.q_len * problem.heads
    row = problem.head_dim * problem.dtype.itemsize
    q, kv = rows * row, problem.batch * problem.k_len * problem.kv_heads * row
    # Inputs in an order of their own are copied; sorting the blocks takes a few passes.
    needed = q + 2 * kv + copied_bytes(problem) + 4 * max(table_bytes(problem, order) for order in orders(problem))
    if len(orders(problem)) > 1:
        # Permuted copies, the result in both orders, the permutation and its inverse.
        needed += (2 * q + 2 * kv) * (2 if problem.needs_grad else 1) + 24 * problem.q_len
    if not compiling:
        return needed + _whole_scores(problem)
    if problem.device.type == "cpu":
        return needed + 2 * kv + 4 * torch.get_num_threads() * BLOCK * (3 * BLOCK + 4 * problem.head_dim)
    # lse, its gradient and rowsum(dO * out); the gradient of out, in order.
    needed += 12 * rows + (2 * q if problem.needs_grad else 0)
    if problem.q_len < BLOCK:
        needed += 4 * max(SPLITS, problem.batch * problem.kv_heads) * rows // problem.batch * (problem.head_dim + 2)
    return needed


def _whole_scores(problem: Problem) -> int:
    wide = 8 if problem.dtype == torch.float64 else 4
    each = 16 * problem.q_len * problem.k_len + 12 * (problem.q_len + problem.k_len) * problem.head_dim
    return wide * problem.batch * problem.heads * each


def first_call_ms(problem: Problem) -> float:
    """What compiling takes, from an empty cache of compiled kernels; 0 where it is done."""
    found = _kept.get((problem, NATURAL))
    if not compiling or (found is not None and found.ready):
        return 0.0
    if problem.device.type == "cpu":
        return CPU_COMPILE_MS
    return CUDA_COMPILE_MS * (3 if problem.needs_grad else 1)


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = NATURAL, **tensors: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    attention = _prepared(problem, order)
    with _settled(problem):
        hidden = Hidden.of(problem, tensors.get("seq_lens"), tensors.get("key_mask"))
        inputs = list(hidden.zeroed(*(once(q, k, v) if problem.needs_grad else (x.detach() for x in (q, k, v)))))
        if attention.positions is not None:
            inputs = [x.index_select(1, attention.positions) for x in inputs]
        result = attention(*map(_heads_first, inputs), *_masks(tensors))
        out, lse = (result, None) if isinstance(result, Tensor) else result
        out = out.transpose(1, 2)
        if attention.positions is not None and attention.places is not None:
            out = out.index_select(1, attention.places)
            lse = None if lse is None else lse.index_select(2, attention.places)
        if problem.needs_grad and hidden.queries is not None:
            # They are 0 and -inf already; their gradients may be anything.
            padding = hidden.queries
            out = out.masked_fill(padding, 0.0)
            lse = None if lse is None else lse.masked_fill(padding[:, None, :, 0, 0], -math.inf)
    return out if lse is None else (out, lse)


def release() -> None:
    """Drop what was compiled, and its block tables."""
    with _lock:
        _kept.clear()


def forget(problem: Problem) -> None:
    """Drop what was compiled for one problem."""
    with _lock:
        for order in ORDERS:
            _kept.pop((problem, order), None)


@dataclass
class _Attention:
    """The function of one problem in one order, compiled by its first call; where inputs are moved to, and back."""

    function: Callable[..., Any]
    table_bytes: int
    positions: Tensor | None = None
    places: Tensor | None = None
    ready: bool = False

    def __call__(self, *inputs: Tensor | None) -> Any:
        if self.ready:
            return self.function(*inputs)
        with warnings.catch_warnings(), machine.without_launchers():
            warnings.simplefilter("ignore")  # of the compiler about its own parts
            result = self.function(*inputs)
        self.ready = True
        return result


def _prepared(problem: Problem, order: str) -> _Attention:
    with _lock:
        found = _kept.get((problem, order))
        if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not (found and found.ready):
            raise RuntimeError("its first call compiles, which no CUDA graph can capture: call it once before")
        if found is None:
            found = _attention(problem, order)
            while _kept and (len(_kept) >= MOST_KEPT or _held() + found.table_bytes > TABLE_LIMIT):
                _kept.popitem(last=False)
            _kept[problem, order] = found
        _kept.move_to_end((problem, order))
    return found


def _attention(problem: Problem, order: str) -> _Attention:
    pattern, kept = problem.pattern.natural, kept_in(problem.pattern)
    with _settled(problem):  # tables of an inference mode could not be used outside of it
        order = order if kept == NATURAL else kept
        at = permutation(order, pattern, problem.q_len) if problem.q_len == problem.k_len else None
        positions = None if at is None else at.to(problem.device)
        moved = positions if kept == NATURAL else None
        back = None if moved is None else places(moved)
    return _Attention(_function(problem, positions), table_bytes(problem, order), moved, back)


def _held() -> int:
    return sum(each.table_bytes for each in _kept.values())


def _heads_first(x: Tensor) -> Tensor:
    """The view [batch, heads, len, head_dim] of a dense tensor in one of two orders: other strides compile anew."""
    if x.transpose(1, 2).is_contiguous() and not x.is_contiguous():
        return _plain(x.transpose(1, 2))
    return _plain(x).transpose(1, 2)


def _plain(x: Tensor) -> Tensor:
    """Contiguous; an axis of one entry, whose stride means nothing, has the usual one."""
    return x.contiguous().reshape(-1).view(x.shape)


def _masks(tensors: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    lens, key_mask = tensors.get("seq_lens"), tensors.get("key_mask")
    return None if lens is None else _plain(lens.to(torch.int32)), None if key_mask is None else _plain(key_mask)


@contextmanager
def _settled(problem: Problem) -> Iterator[None]:
    """The same state of torch on every call: the compiler makes a kernel for each state that it meets."""
    with ExitStack() as stack:
        # A default device is one of these. No tensor is made here that would ask for it.
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(problem.needs_grad))
        yield


def _unmasked(problem: Problem) -> bool:
    return not problem.masked and count_of(problem.pattern.natural, problem.q_len, problem.k_len, problem.heads) is None


def _function(problem: Problem, positions: Tensor | None) -> Callable[..., Any]:
    """From q, k, v [batch, heads, len, head_dim], seq_lens and key_mask to out, or (out, lse). `positions` are those of
    the rows of q, k and v; masks are about tokens as the caller keeps them.
    """
    from torch.nn.attention import flex_attention as library

    with _settled(problem):
        tables = None if _unmasked(problem) else _tables(problem, positions)
    attend: Any = library.flex_attention if compiling else _uncompiled
    count = count_of(problem.pattern.natural, problem.q_len, problem.k_len, problem.heads)
    as_kept = positions is None or kept_in(problem.pattern) != NATURAL
    bias = repeats(problem.pattern.natural) and count is not None
    wide = sum_dtype(problem.dtype)
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.heads != problem.kv_heads}
    options.update(_lse_options(library, problem))

    def call(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None, key_mask: Tensor | None) -> Any:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            at_i, at_j = (i, j) if positions is None else (positions[i], positions[j])
            seen = j >= 0 if count is None else count(h, at_i, at_j) > 0
            i, j = (i, j) if as_kept else (at_i, at_j)
            if seq_lens is not None:
                seen = seen & (i < seq_lens[b]) & (j < seq_lens[b])
            return seen if key_mask is None else seen & key_mask[b, j]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert count is not None
            i, j = (i, j) if positions is None else (positions[i], positions[j])
            return s + count(h, i, j).clamp(min=1).to(wide).log()

        if compiling and not torch.compiler.is_dynamo_compiling():
            # Without the compiler the library would hold every score, and only warn.
            raise RuntimeError("torch.compile is turned off, so that there is no kernel to run")
        blocks = None if tables is None else library.BlockMask(mask_mod=mask, **tables)
        result = attend(q, k, v, score_mod=score if bias else None, block_mask=blocks, **options)
        return (result[0], getattr(result[1], "lse", result[1])) if problem.return_lse else result

    if not compiling:
        return call
    # The compiler counts its kernels by code object, and gives up past a few: each problem has one of its own.
    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _lse_options(library: Any, problem: Problem) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if problem.return_lse:
        # Since torch 2.9 a request, a flag before.
        request = getattr(library, "AuxRequest", None)
        options = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    if problem.device.type == "cpu" and problem.q_len == 1:
        # Its kernel for a single query takes no table of partial blocks alone; parts that no block fits rule it out.
        options["kernel_options"] = {"PARTITION_SIZE": 1}
    return options


def _tables(problem: Problem, positions: Tensor | None) -> dict[str, Any]:
    """What a BlockMask holds but its function. seq_lens and key_mask are data: then no block is known to be whole."""
    q_len, k_len, heads = problem.q_len, problem.k_len, problem.heads
    blocks = blocks_of(problem.pattern.natural, q_len, k_len, heads, BLOCK, problem.device, positions)
    whole = torch.zeros_like(blocks.whole) if problem.masked else blocks.whole
    tables: dict[str, Any] = {"seq_lengths": (q_len, k_len), "BLOCK_SIZE": (BLOCK, BLOCK)}
    for prefix, chosen in (("", blocks.some & ~whole), ("full_", whole)):
        used = not prefix or bool(whole.any())
        for side, table in (("kv", chosen), ("q", chosen.mT)):
            count, order = _listed(table) if used else (None, None)
            tables |= {f"{prefix}{side}_num_blocks": count, f"{prefix}{side}_indices": order}
    return tables


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are set, and which, those set first; with an axis for the batch."""
    count = table.sum(-1, dtype=torch.int32)
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None].contiguous(), order[None].contiguous()


def _uncompiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    return_aux: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """FlexAttention's own definition, which flex_attention keeps from gradients on a CPU."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator
    from torch.nn.attention import flex_attention as library

    block_mask = library._create_empty_block_mask(q, k) if block_mask is None else block_mask
    score_mod = library._identity if score_mod is None else score_mod
    out, lse, *_ = operator(q, k, v, score_mod, block_mask.as_tuple(), scale, {})
    return (out, lse * math.log(2)) if return_lse or return_aux is not None else out
