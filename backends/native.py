"""A C++ kernel for CPUs: one pass with one softmax over all branches, without merging.

The machine's own C++ compiler builds attn_dispatch/kernels/native/attention.cpp on first use; without one, a
library that the wheel carries for the processor's level is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_dispatch.kernels import dropout
from attn_dispatch.kernels.autograd import Passes, differentiable, refuse_tangents
from attn_dispatch.kernels.contract import SCORE_TERMS, Refusal, Result, refuse_pattern
from attn_dispatch.kernels.formula import bounded
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.limits import ANY, Limits
from attn_dispatch.kernels.native import data_tables, library, tables
from attn_dispatch.kernels.native import run as passes
from attn_dispatch.kernels.native.run import DTYPES, HEAD_DIM, NO_ADDRESS, NativePasses
from attn_dispatch.kernels.native.tables import PERIOD_LIMIT, NativeTables, native_tables
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL, ORDERS, serves
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

name = "native"
score_terms, partial, specialized = SCORE_TERMS, passes.partial, passes.specialized
takes_data = True

LIMITS = Limits("cpu", dict.fromkeys(DTYPES, ANY), head_dim=HEAD_DIM, grad_lse=True, masks=True, dropout=True)


def version() -> str:
    """The processor's level and a digest of the source. Raises ImportError: it cannot run here."""
    return library.version()


def refusals(problem: Problem) -> list[Refusal]:
    found = LIMITS.refusals(problem)
    if isinstance(problem.pattern, Form):
        within = getattr(problem.pattern, "within", Dense())
        if data_tables.refused_within(within):
            found.append(Refusal("pattern", f"cuts blocks by Dense and Window, not by {within}"))
    elif tables.neighborhood_and_order(problem.pattern)[0] is None:
        found += refuse_pattern(problem, (Dense, Window, Dilated, Neighborhood))
    if (tokens := tables.dilation_period(problem.pattern)) > PERIOD_LIMIT:
        found.append(Refusal("pattern", f"its dilation rates repeat every {tokens} tokens, over {PERIOD_LIMIT}"))
    try:
        library.used_prebuilt()
    except ImportError as error:
        found.append(Refusal("not_installed", str(error)))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """Token orders of a neighbourhood. Other patterns need none: their tiles are arithmetic progressions."""
    if not isinstance(problem.pattern, Neighborhood):
        return (NATURAL,)
    return tuple(order for order in ORDERS if serves(order, problem.pattern))


def prepare() -> None:
    """Compile for this machine unless already compiled, which takes up to a minute, and keep it with the decisions."""
    library.load()
    library.keep()


def prepared() -> bool:
    """Whether the library is there, so that `prepare` takes no time."""
    return library.is_compiled()


def flops(problem: Problem) -> int:
    is_form, sizes = isinstance(problem.pattern, Form), (problem.q_len, problem.k_len)
    pairs = problem.heads * problem.pattern.pairs(*sizes, ()) if is_form else passes.pair_count(problem)
    return problem.batch * pairs * problem.head_dim * (14 if problem.needs_grad else 4)


def workspace_bytes(problem: Problem) -> int:
    width, grads = passes.padded_width(problem.head_dim), problem.needs_grad
    if isinstance(problem.pattern, Form):
        total = passes.scratch_bytes(problem) + data_tables.table_bytes(problem)
    else:
        total = passes.scratch_bytes(problem) + max(
            tables.native_table_bytes(problem, each) for each in orders(problem)
        )
    q, k = problem.batch * problem.heads * problem.q_len, problem.batch * problem.kv_heads * problem.k_len
    total += 4 * q * (3 if grads else 1) + problem.batch * (problem.k_len * problem.has_key_mask + 8)
    # Rows with a last stride over 1 are copied; so may be out's gradient.
    item = problem.head_dim * problem.dtype.itemsize
    total += item * (sum(n for n, kind in zip((q, k, k), problem.strides) if kind[-1:] != "d") + q * grads)
    if grads:  # sums of every thread that has a key head, and their total
        total += 4 * passes.sums_apart(problem) or 8 * k * width * (1 + passes.threads_per_key_head(problem)) + item * k
    if problem.bias or _cuts_tiles(problem):
        total += copied_bytes(problem)
    if problem.bias:  # in float32, and its gradient before it is summed
        pairs = 4 * problem.q_len * problem.k_len
        total += pairs * (2 * math.prod(problem.bias) + problem.batch * problem.heads * problem.bias_needs_grad)
    return total


def _cuts_tiles(problem: Problem) -> bool:
    """Whether a table's tiles hold queries that do not see its keys, which are read: padding, or by what blocks are
    within.
    """
    within = getattr(problem.pattern, "within", Dense())
    return isinstance(problem.pattern, Form) and (problem.has_seq_lens or within != Dense())


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = NATURAL, **tensors: Tensor) -> Result:
    if isinstance(problem.pattern, Form):
        odd = problem.needs_grad or problem.dropout_p or _cuts_tiles(problem)
        if len(tensors) == 1 and not odd:
            found = data_tables.specialized(problem, tensors["pattern_data"], q, k, v)
            if found is not None:
                return found(q, k, v, problem)
        return _run(q, k, v, problem, (), tensors)
    return _run(q, k, v, problem, (native_tables(problem, order),), tensors)


def _shown(bias: Tensor) -> Tensor:
    """A bounded bias with +inf for NaN, which the kernel would take for its least number: a row's maximum of +inf makes
    the row NaN.
    """
    return bias.nan_to_num_(math.inf, math.inf, -math.inf)


def run_documents(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...], **tensors: Tensor
) -> Result:
    return _run(q, k, v, problem, tables.document_tables(problem, lengths), tensors)


def _run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, parts: tuple[NativeTables, ...], tensors: dict[str, Tensor]
) -> Result:
    key_mask, seq_lens = tensors.get("key_mask"), tensors.get("seq_lens")
    seen = None if key_mask is None else key_mask.contiguous()
    # Wrapped tensors have no address, and those of meta tensors are invalid.
    if any(x.device.type != "cpu" or not x.data_ptr() for x in (q, k, v)):
        raise TypeError(NO_ADDRESS)
    refuse_tangents(name, q, k, v, tensors.get("bias"), tensors.get("alibi_slopes"))
    lengths = None if seq_lens is None else seq_lens.long().contiguous()
    bias, slopes = tensors.get("bias"), tensors.get("alibi_slopes")
    wide = None if bias is None else _shown(bounded(bias.detach(), torch.float32))
    slopes = None if slopes is None else slopes.float().resolve_neg().contiguous()
    seed = int(dropout.drawn_seed(q.device)) if problem.dropout_p else 0
    native: Passes
    if parts:
        native = NativePasses(problem, parts[0], seen, lengths, wide, slopes, parts[1:], seed=seed)
    else:
        native = data_tables.passes_of(problem, tensors["pattern_data"], seen, lengths, wide, slopes, seed)
    # Its masks keep the kernel from reading keys; a bias does not.
    cut = _cuts_tiles(problem)
    hidden = Hidden.of(problem, tensors, pattern=cut, masked_keys=False) if cut or bias is not None else None
    call = native if hidden is None else hidden.around(native)
    if problem.needs_grad:
        return differentiable(q, k, v, call, (bias, seen, lengths, slopes, tensors.get("pattern_data")))
    if isinstance(call, NativePasses) and not problem.return_lse:
        return call.out(q, k, v, None)
    return call.forward(q, k, v)
