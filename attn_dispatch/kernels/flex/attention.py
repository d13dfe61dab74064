"""FlexAttention of a problem: its functions and block tables, compiled once for each kind of inputs.

Source: Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_second_derivatives
from attn_dispatch.kernels.contract import Refusal, refuse_pattern
from attn_dispatch.kernels.device_cache import DeviceCache, refuse_capture, refuse_compiling
from attn_dispatch.kernels.flex.data import (
    NO_DATA,
    DataTables,
    arithmetic,
    counted_by,
    table_axes,
    table_bytes,
    tables_of,
    without_density,
)
from attn_dispatch.kernels.flex.mask import (
    LISTS,
    Blocks,
    Count,
    RowCount,
    blocks_of,
    counts_above_one,
    distinct_heads,
    listed,
    multiplicity_function,
    score_function,
)
from attn_dispatch.kernels.formula import bounded
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL, ORDERS, permutation, places, serves, token_order_of
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib

BLOCK = 128  #: tokens per side of a block; every kernel configuration divides it
TABLE_LIMIT = 2**30  #: bytes of block tables in the cache
MAX_COMPILED = 64  #: compiled problems in the cache
MOST_DECODED = 64  #: queries by heads that share keys, up to which PyTorch's kernel for few queries is asked
SPLITS = 1024  #: the most parts that the keys are split into for few queries, to use a whole GPU

#: False only in tests: the same functions then run uncompiled on whole score matrices, with gradients and lse on every
#: device, so that tests check them without a compiler.
compiling = True


def refusals(problem: Problem, patterns: tuple[type[Pattern], ...]) -> list[Refusal]:
    """What has no block tables, or too large ones."""
    form = problem.pattern
    pattern = arithmetic(form) if isinstance(form, Form) else form
    unknown = refuse_pattern(replace(problem, pattern=pattern), patterns)
    if unknown:  # the code below needs a known pattern
        return unknown
    if problem.q_len != problem.k_len and not isinstance(pattern, Dense | Window):
        return [Refusal("lengths", f"takes equal lengths here, not {problem.q_len} and {problem.k_len}")]
    needed = block_table_bytes(problem)
    if needed <= TABLE_LIMIT:
        return []
    text = f"{problem.pattern} needs block tables of {gib(needed)}, over {gib(TABLE_LIMIT)}"
    return [Refusal("over_memory", text)]


def orders(problem: Problem) -> tuple[str, ...]:
    """Natural order, and orders in which there may be fewer blocks."""
    found = [each for each in ORDERS if serves(each, problem.pattern) and each != NATURAL]
    return (NATURAL, *(each for each in found if block_table_bytes(problem, each) <= TABLE_LIMIT))


def block_table_bytes(problem: Problem, order: str = NATURAL) -> int:
    """Bytes of the block tables: int32, two for queries and two for keys."""
    if _unmasked(problem):
        return 0
    entries = -(-problem.q_len // BLOCK) * -(-problem.k_len // BLOCK)
    moved = order != NATURAL or token_order_of(problem.pattern) != NATURAL
    rows, heads = table_axes(problem.pattern, problem)
    distinct = distinct_heads(arithmetic(problem.pattern), problem.heads, BLOCK, moved)
    return 16 * rows * max(heads, distinct) * entries


def flops(problem: Problem) -> int:
    """Operations on all pairs of the computed blocks."""
    if isinstance(problem.pattern, Form):
        pairs = problem.heads * problem.pattern.pairs(problem.q_len, problem.k_len, ())
    else:
        of_pattern = problem.pattern, problem.q_len, problem.k_len, problem.heads, problem.device
        pairs = _computed_blocks(*of_pattern) * BLOCK**2
    return problem.batch * pairs * problem.head_dim * (14 if problem.needs_grad else 4)


@lru_cache(maxsize=4096)
def _computed_blocks(pattern: Pattern, q_len: int, k_len: int, heads: int, device: torch.device) -> int:
    """Nonempty blocks of all heads."""
    stored = permutation(token_order_of(pattern), pattern.natural, q_len)
    some = blocks_of(pattern.natural, q_len, k_len, heads, BLOCK, device, stored).nonempty
    return int(some.sum()) * (heads // len(some))


def workspace_bytes(problem: Problem) -> int:
    rows = problem.batch * problem.q_len * problem.heads
    row = problem.head_dim * problem.dtype.itemsize
    q, kv = rows * row, problem.batch * problem.k_len * problem.kv_heads * row
    # Inputs with other strides are copied; sorting the block tables takes temporaries.
    needed = q + 2 * kv + copied_bytes(problem) + 4 * max(block_table_bytes(problem, each) for each in orders(problem))
    needed += 8 * problem.q_len * problem.k_len * math.prod(problem.bias or (0,)) + table_bytes(problem, BLOCK)
    if len(orders(problem)) > 1:
        # Inputs and the result in both orders, the permutation and its inverse.
        needed += (2 * q + 2 * kv) * (2 if problem.needs_grad else 1) + 24 * problem.q_len
    if not compiling:
        return needed + _whole_scores(problem)
    if problem.device.type == "cpu":
        return needed + 2 * kv + 4 * torch.get_num_threads() * BLOCK * (3 * BLOCK + 4 * problem.head_dim)
    # lse, its gradient and rowsum(dO * out); the gradient of out, permuted.
    needed += 12 * rows + (2 * q if problem.needs_grad else 0)
    if problem.q_len < BLOCK:
        needed += 4 * max(SPLITS, problem.batch * problem.kv_heads) * rows // problem.batch * (problem.head_dim + 2)
    return needed


def _whole_scores(problem: Problem) -> int:
    wide = sum_dtype(problem.dtype).itemsize
    each = 16 * problem.q_len * problem.k_len + 12 * (problem.q_len + problem.k_len) * problem.head_dim
    return wide * problem.batch * problem.heads * each


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, attention: CompiledAttention, **tensors: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """A backend's `run`, by what `made` returned for the problem."""
    if not attention.ready:
        refuse_capture(problem.device)
    with _plain_torch_state(problem):
        hidden = Hidden.of(problem, tensors)
        given = refuse_second_derivatives(q, k, v) if problem.needs_grad else [x.detach() for x in (q, k, v)]
        inputs = list(hidden.zeroed(*given))
        if attention.positions is not None:
            inputs = [x.index_select(1, attention.positions) for x in inputs]
        data = tensors.get("pattern_data")
        tables = NO_DATA if data is None else tables_of(problem, data, BLOCK)
        result = attention(*map(_heads_first, inputs), *_masks(tensors), data=tables)
        out, lse = (result, None) if isinstance(result, Tensor) else result
        out = out.transpose(1, 2)
        if attention.positions is not None and attention.places is not None:
            out = out.index_select(1, attention.places)
            lse = None if lse is None else lse.index_select(2, attention.places)
        if problem.needs_grad and hidden.queries is not None:
            # Forward values are 0 and -inf already; this makes gradients zero, even if NaN came in.
            padding = hidden.queries
            out = out.masked_fill(padding, 0.0)
            lse = None if lse is None else lse.masked_fill(padding[:, None, :, 0, 0], -math.inf)
    return out if lse is None else (out, lse)


@dataclass
class CompiledAttention:
    """The functions of one problem in one order, one for each kind of inputs, compiled by their first calls.

    `positions` and `places` permute inputs and results; None: no permutation.
    """

    made: Callable[[bool], Callable[..., Any]]
    block_table_bytes: int
    positions: Tensor | None = None
    places: Tensor | None = None
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict[Any, Callable[..., Any]])

    @property
    def ready(self) -> bool:
        return bool(self.functions)

    def __call__(self, *inputs: Tensor | None, data: DataTables = NO_DATA) -> Any:
        # What the compiler's guards would compare, which takes longer: they are left out.
        read = (x for x in (*inputs, *data.counted) if x is not None)
        kind = data.repeated, *((x.stride(), x.dtype, x.requires_grad, type(x)) for x in read)
        function = self.functions.get(kind)
        if function is not None:
            return function(*inputs, data.counted, data.lists)
        refuse_compiling("the function of flex_attention for this call")
        function = self.made(data.repeated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the compiler's internals
            result = function(*inputs, data.counted, data.lists)
        self.functions[kind] = function
        return result


def made(problem: Problem, order: str, flash_block: int = 0) -> CompiledAttention:
    """What `run` calls, to be kept; `flash_block`: see `_function`."""
    pattern, stored = problem.pattern.natural, token_order_of(problem.pattern)
    order = order if stored == NATURAL else stored
    at = permutation(order, pattern, problem.q_len) if problem.q_len == problem.k_len else None
    positions = None if at is None else at.to(problem.device)
    moved = positions if stored == NATURAL else None
    back = None if moved is None else places(moved)
    make = partial(_function, problem, positions, flash_block)
    own_tables = 0 if isinstance(pattern, Form) else block_table_bytes(problem, order)
    return CompiledAttention(make, own_tables, moved, back)


def kept(make: Callable[[Problem, str], CompiledAttention]) -> DeviceCache[[str], CompiledAttention]:
    size, key = (lambda found: found.block_table_bytes), (lambda problem, order: (without_density(problem), order))
    return DeviceCache(make, key, size, MAX_COMPILED, TABLE_LIMIT)


def _heads_first(x: Tensor) -> Tensor:
    """[batch, heads, len, head_dim] with one of two memory layouts: other strides would compile anew."""
    if x.transpose(1, 2).is_contiguous() and not x.is_contiguous():
        return _plain(x.transpose(1, 2))
    return _plain(x).transpose(1, 2)


def _plain(x: Tensor) -> Tensor:
    """x contiguous, its signs in memory, with the default stride also on axes of size 1."""
    if x.stride() == _strides(x.shape) and not x.is_neg():
        return x
    return x.resolve_neg().contiguous().reshape(-1).view(x.shape)


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _masks(tensors: dict[str, Tensor]) -> list[Tensor | None]:
    lens, key_mask, bias, slopes = (tensors.get(name) for name in ("seq_lens", "key_mask", "bias", "alibi_slopes"))
    lens = None if lens is None else lens.to(torch.int32)
    bias = None if bias is None else bounded(bias.detach(), sum_dtype(bias.dtype))
    return [None if x is None else _plain(x.detach()) for x in (lens, key_mask, bias, slopes)]


@contextmanager
def _plain_torch_state(problem: Problem) -> Iterator[None]:
    """Set the same torch state for every call: the compiler compiles a kernel per state."""
    with ExitStack() as stack:
        # One of these modes is the default device; inside, every new tensor names its device.
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(problem.needs_grad))
        yield


def _unmasked(problem: Problem) -> bool:
    return (
        not (problem.masked or problem.bias or isinstance(problem.pattern, Form))
        and multiplicity_function(problem.pattern.natural, problem.q_len, problem.k_len, problem.heads) is None
    )


def _function(
    problem: Problem, positions: Tensor | None, flash_block: int = 0, repeated: bool = False
) -> Callable[..., Any]:
    """The function from q, k, v [batch, heads, len, head_dim], the tensors of `_masks` and of `DataTables` to out, or
    (out, lse).

    Args:
        positions: natural positions of the rows of q, k and v. Masks go by place in the caller's tensors.
        flash_block: tokens per side of a block of flash-attn 4's kernel; 0: PyTorch's kernel runs.
        repeated: whether a query may see a key more than once by the pattern's tensors.
    """
    from torch.nn.attention import flex_attention as library

    tables = None if _unmasked(problem) else _tables(problem, positions, flash_block)
    attend: Any = library.flex_attention if compiling else _uncompiled
    plain, form, device = arithmetic(problem.pattern), problem.pattern, problem.device
    of_plain = multiplicity_function(plain, problem.q_len, problem.k_len, problem.heads, device)
    as_stored = positions is None or token_order_of(problem.pattern) != NATURAL
    adds = counts_above_one(plain) or repeated
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.heads != problem.kv_heads}
    options.update(_lse_options(library, problem), **_kernel_options(problem, flash_block))

    def call(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        seq_lens, key_mask, bias, slopes, counted, lists = given
        count = _at(of_plain, positions)
        if isinstance(form, Form):
            count = counted_by(form, of_plain, problem.heads, counted, repeated)

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = j >= 0 if count is None else count(b, h, i, j) > 0
            i, j = (i, j) if as_stored or positions is None else (positions[i], positions[j])
            if seq_lens is not None:
                seen = seen & (i < seq_lens[b]) & (j < seq_lens[b])
            if bias is not None:
                row, head = (index * (size > 1) for index, size in zip((b, h), problem.bias))
                seen = seen & (bias[row, head, i, j] != -math.inf)
            return seen if key_mask is None else seen & key_mask[b, j]

        score = score_function(problem, count if adds else None, None if as_stored else positions, bias, slopes)
        if compiling and not torch.compiler.is_dynamo_compiling():  # the library would allocate all scores
            raise RuntimeError("torch.compile is turned off, so that there is no kernel to run")
        blocks = None if tables is None else library.BlockMask(mask_mod=mask, **tables, **dict(zip(LISTS, lists)))
        result = attend(q, k, v, score_mod=score, block_mask=blocks, **options)
        return (result[0], getattr(result[1], "lse", result[1])) if problem.return_lse else result

    if not compiling:
        return call
    # The compiler limits kernels per code object: each problem gets a code object.
    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    skip = getattr(torch.compiler, "skip_all_guards_unsafe", None)  # since torch 2.11
    return torch.compile(own, fullgraph=True, dynamic=False, options=skip and {"guard_filter_fn": skip})


def _lse_options(library: Any, problem: Problem) -> dict[str, Any]:
    if not problem.return_lse:
        return {}
    request = getattr(library, "AuxRequest", None)  # since torch 2.9; before, a flag
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _kernel_options(problem: Problem, flash_block: int) -> dict[str, Any]:
    if flash_block:
        return {"kernel_options": {"BACKEND": "FLASH"}}
    if problem.device.type == "cpu" and problem.q_len == 1:
        # The kernel for a single query fails without a table of full blocks; this partition size disables it.
        return {"kernel_options": {"PARTITION_SIZE": 1}}
    # The kernel for few queries has those of all heads that share keys in one tile, for which there may be no room.
    many = problem.device.type == "cuda" and problem.q_len * problem.heads // problem.kv_heads > MOST_DECODED
    return {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}} if many else {}


def _at(count: Count | None, positions: Tensor | None) -> RowCount | None:
    """The multiplicity of rows at these positions."""
    if count is None:
        return None
    if positions is None:
        return lambda b, h, i, j: count(h, i, j)
    return lambda b, h, i, j: count(h, positions[i], positions[j])


def _tables(problem: Problem, positions: Tensor | None, flash_block: int = 0) -> dict[str, Any]:
    """The fields of a BlockMask without its function, and, of masks made of data, without the lists."""
    q_len, k_len, heads, size = problem.q_len, problem.k_len, problem.heads, flash_block or BLOCK
    tables: dict[str, Any] = {"seq_lengths": (q_len, k_len), "BLOCK_SIZE": (size, size)}
    if isinstance(problem.pattern, Form):
        return tables
    found = blocks_of(problem.pattern.natural, q_len, k_len, heads, size, problem.device, positions)
    partly = bool(problem.masked or problem.bias)
    # flash-attn 4's kernel takes lists of both kinds, or none.
    return tables | listed(Blocks(found.nonempty[None], found.full[None]), partly, always=bool(flash_block))


def _uncompiled(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, **options: Any) -> Any:
    """FlexAttention's eager definition; flex_attention refuses gradients on a CPU, its operator does not."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator
    from torch.nn.attention import flex_attention as library

    block_mask = library._create_empty_block_mask(q, k) if block_mask is None else block_mask
    score_mod = library._identity if score_mod is None else score_mod
    out, lse, *_ = operator(q, k, v, score_mod, block_mask.as_tuple(), scale, {})
    return (out, lse * math.log(2)) if {"return_lse", "return_aux"} & options.keys() else out
