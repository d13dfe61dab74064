"""Common parts of the Triton backends: refusals, block sizes that fit the GPU, and launching.

If TRITON_INTERPRET=1 was set before the first import of triton, its interpreter runs the same kernels on a CPU,
thousands of times slower, to check results.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from attn_dispatch import process_state, settings
from attn_dispatch.kernels import dropout
from attn_dispatch.kernels.contract import Refusal, refuse_pattern
from attn_dispatch.kernels.device_cache import is_noted, refuse_compiling
from attn_dispatch.kernels.limits import ANY, HALF, Limits
from attn_dispatch.kernels.triton.blocks import (
    HEAD_DIM_LIMIT,
    BlockConfig,
    Blocks,
    Kernel,
    blocks_for,
    clipped,
    multiplies_from_registers,
    padded,
    parts_of,
    precision,
    shared_limit,
)
from attn_dispatch.kernels.triton.work_list import Side
from attn_dispatch.log import logger
from attn_dispatch.machine.environment import installed
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem

#: From capability 8.0 on there are bfloat16 products and asynchronous copies.
LIMITS = Limits(
    "cuda",
    dict.fromkeys((*HALF, torch.float32), (8, 0)),
    head_dim=HEAD_DIM_LIMIT,
    grad_lse=True,
    masks=True,
    dropout=True,
)
#: Without bfloat16: the interpreter uses numpy, which lacks it.
INTERPRETED = LIMITS._replace(device="cpu", dtypes=dict.fromkeys((torch.float16, torch.float32), ANY))
OLDEST = "3.4"  #: version of Triton, the first whose kernels unpack tuples with None
INTERPRETED_BLOCK = BlockConfig(64, 64, 4, 1)
COMPILE_MS = 5_000.0  #: of one kernel: the most where processors are idle, float32 with head_dim 256
POSITION_LIMIT = 2**29  #: queries plus keys; sums of three positions and a step are 32-bit
OFFSET_LIMIT = 2**31  #: elements of a head's extent from which offsets need 64 bits
BIASED = 64, 32  #: rows and columns of a block with a bias or dropout, at most: they take registers
#: Options of every launch: a product and a sum are one instruction, Triton's default until 3.9, which warns of its end.
FUSED = {"enable_fp_fusion": True}

T = TypeVar("T")
_interpreter = process_state.lock()  #: it has one grid, and one patched `triton.language`, for all threads
_too_large: set[tuple[object, ...]] = set()  #: blocks of a kernel that turned out to need more than the GPU has
process_state.register(process_state.FACTS, _too_large.clear)


@dataclass(frozen=True, slots=True, eq=False)
class TritonKernel:
    """A kernel and its block sizes.

    Args:
        kernel: name of the function.
        side: whether rows are queries or keys.
        row_operands: tensors of rows held in shared memory.
        products: matrix products per block of scores.
        single: for float32, blocks other than those of `blocks`.
    """

    kernel: Kernel
    side: Side
    row_operands: int
    products: int
    single: Blocks | None = None

    def load(self) -> Any:
        """The kernel; imports triton."""
        module = import_module(f"attn_dispatch.kernels.triton.{self.kernel.partition('_')[0]}")
        return getattr(module, self.kernel)


def kernels_of(single: Blocks | None = None) -> tuple[TritonKernel, TritonKernel, TritonKernel]:
    """The kernels of a backend."""
    return (
        TritonKernel("forward", "queries", row_operands=1, products=2, single=single),
        TritonKernel("backward_q", "queries", row_operands=2, products=3, single=single),
        TritonKernel("backward_kv", "keys", row_operands=2, products=4, single=single),
    )


def needed(kernels: tuple[TritonKernel, ...], problem: Problem) -> tuple[TritonKernel, ...]:
    """Those of `kernels_of` that the problem needs."""
    return kernels if problem.needs_grad else kernels[:1]


def first_call_ms(name: str, problem: Problem, compiled_for: Hashable) -> float:
    """Estimated compile time with an empty cache; 0 if this process has such kernels."""
    ready = problem.device.type == "cpu" or is_noted(name, problem, compiled_for)
    return 0.0 if ready else COMPILE_MS * (3 if problem.needs_grad else 1)


def version() -> str:
    """Triton's version, and a digest of the kernels: decisions about other kernels do not hold for these."""
    found = f"{metadata.version('triton')} {_digest()}"
    return f"{found} interpreted" if interpreting() else found


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def interpreting() -> bool:
    """Whether Triton's interpreter is requested."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str:
    """Why there is no Triton to use; empty if there is."""
    has = installed("triton")
    if find_spec("triton") is None:
        return "package triton is not installed (pip install 'attn-dispatch[triton]')"
    old = has is not None and TorchVersion(has) < OLDEST
    return f"package triton is {has}, needs {OLDEST} or newer, which torch 2.8 and newer bring" if old else ""


def refusals(problem: Problem, patterns: tuple[type[Pattern], ...]) -> list[Refusal]:
    """The refusals common to all Triton backends."""
    limits = INTERPRETED if problem.device.type == "cpu" and interpreting() else LIMITS
    found = limits.refusals(problem) + refuse_pattern(problem, patterns)
    found += [Refusal("not_installed", why)] if (why := missing()) else []
    positions = problem.q_len + problem.k_len
    if positions > POSITION_LIMIT:
        found.append(Refusal("length", f"counts up to {POSITION_LIMIT} queries and keys, not {positions}"))
    return found


def fitting_blocks(each: TritonKernel, problem: Problem) -> tuple[BlockConfig, ...]:
    """The blocks that fit into shared memory on CUDA, in order of preference; the smallest if none fits."""
    if problem.device.type == "cpu":
        return (INTERPRETED_BLOCK,)
    listed = blocks_for(each.kernel, problem, each.single)
    if problem.bias or problem.dropout_p:
        listed = tuple(replace(clipped(block, *BIASED), stages=2) for block in listed)
    limit = shared_limit(problem.device)
    return tuple(block for block in listed if shared_bytes(each, problem, block) <= limit) or listed[-1:]


def shared_bytes(each: TritonKernel, problem: Problem, block: BlockConfig) -> int:
    """Estimated shared memory of a block: rows, columns of all pipeline stages, and scores.

    Seldom less than what Triton takes, but for three products of tf32 numbers: a launch finds that out.
    """
    stages, sums = block.stages, 0
    if stages > 1 and multiplies_from_registers(problem):
        stages -= 1  # the last one's columns are in registers
        sums = 8 * block.columns * stages if each.side == "keys" else 0  # lse and delta
    streamed = 2 * block.columns * stages
    return sums + problem.dtype.itemsize * (
        sum(parts_of(problem.head_dim)) * (each.row_operands * block.rows + streamed) + block.rows * block.columns
    )


def grad_or_zeros(grad: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of out, its signs in memory; where None, zeros expanded from one element."""
    if grad is None:
        return torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    return grad.resolve_neg()


class Given(NamedTuple):
    """A call's tensors besides q, k and v, as kernels read them: `of` makes them of a backend's.

    Args:
        key_mask: uint8, contiguous; 0 for hidden keys.
        bias: expanded to [batch, heads, q_len, k_len].
        slopes: float32 [batch, heads], contiguous.
        seed: of dropout, int64 [1].
    """

    seq_lens: Tensor | None = None
    key_mask: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    seed: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, tensors: Mapping[str, Tensor]) -> Given:
        found: dict[str, Tensor] = {}
        for name, x in tensors.items():
            x = x.detach().resolve_neg()
            if name == "bias":
                found["bias"] = x.expand(problem.batch, problem.heads, -1, -1)
            elif name == "alibi_slopes":
                found["slopes"] = x.float().expand(problem.batch, -1).contiguous()
            elif name == "seq_lens":
                found[name] = x.contiguous()
            elif name == "key_mask":
                found[name] = x.contiguous().view(torch.uint8)
        if problem.dropout_p:
            found["seed"] = dropout.drawn_seed(problem.device)
        return cls(**found)


NOTHING = Given()


def bytes_beside_lists(problem: Problem) -> int:
    """Upper bound of the bytes of copies in `Given`, and of lse; for gradients also of scaled lse, delta, and a
    contiguous gradient of lse.
    """
    given = problem.k_len * problem.has_key_mask + 8 * problem.heads * (problem.alibi_axes > 0) + 8
    return problem.batch * (given + 4 * problem.heads * problem.q_len * (4 if problem.needs_grad else 1))


class Terms(NamedTuple):
    """What a call does to its scores (see `terms`): scale, cap, slopes, bias with its strides; and dropout."""

    scale: float
    softcap: float
    slopes: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    dropped: int
    gain: float
    bias_b: int = 0
    bias_h: int = 0
    bias_q: int = 0
    bias_k: int = 0

    @classmethod
    def of(cls, problem: Problem, given: Given) -> Terms:
        strides = () if given.bias is None else given.bias.stride()
        softcap = max(problem.softcap, torch.finfo(torch.float32).tiny)
        drops = given.seed, dropout.threshold(problem.dropout_p), dropout.gain(problem.dropout_p)
        return cls(as_float32(problem.scale), softcap, given.slopes, given.bias, *drops, *strides)


class Meta(NamedTuple):
    """What a kernel is compiled for, each a `tl.constexpr` in the kernel (see `lists` and `parts`).

    Args:
        GROUP: query heads that share a key head.
        BLOCK_D, REST_D: `parts_of` HEAD_DIM.
        ROWS, COLUMNS: of a block.
        TILE: places of a tile; 0: lists are runs.
        BRANCHES, AXES: of `reach`.
        BY_ROW: whether each row of the batch has lists of its own.
        SINKS: whether there are runs of sinks.
        SOFTCAP, BIAS, ALIBI, DROPS: whether `Terms` has them.
        PRECISION: of products.
        WIDE: offsets within a head need 64 bits.
    """

    GROUP: int
    HEAD_DIM: int
    BLOCK_D: int
    REST_D: int
    ROWS: int
    COLUMNS: int = 0
    TILE: int = 0
    BRANCHES: int = 0
    AXES: int = 0
    SINKS: bool = False
    SOFTCAP: bool = False
    BIAS: bool = False
    ALIBI: bool = False
    PRECISION: str = "ieee"
    WIDE: bool = False
    BY_ROW: bool = False
    DROPS: bool = False

    @classmethod
    def of(cls, problem: Problem, rows: int, columns: int, strided: Sequence[Tensor], bias: Tensor | None) -> Meta:
        d, group = problem.head_dim, problem.heads // problem.kv_heads
        terms = bool(problem.softcap), bool(problem.bias), bool(problem.alibi_axes)
        wide = needs_wide_offsets(strided if bias is None else [*strided, bias.transpose(1, 2)])
        made = cls(group, d, padded(d), 0, rows, columns, 0, 0, 0, False, *terms, precision(problem), wide)
        return made._replace(DROPS=problem.dropout_p > 0)


class Launch(NamedTuple):
    """A launch of a kernel on a tuple of tensors, with `others` and `options` after it.

    `compiled` is Triton's kernel for these arguments, None where there was nothing to compute.
    """

    kernel: Any
    compiled: Any
    programs: int
    device: torch.device
    others: tuple[Any, ...]
    options: dict[str, Any]

    def again(self) -> Callable[..., object]:
        """A function that makes the launch on other tensors, without Triton's look-ups: of the same shapes, strides and
        dtypes, as aligned, on the same device.
        """
        if self.compiled is None:
            return lambda tensors: None

        def as_before(tensors: Sequence[Tensor | None]) -> object:
            return self.kernel[(self.programs,)](tensors, *self.others, **self.options)

        tail = _addresses(self.others)
        runtime: Any = import_module("triton.knobs").runtime
        active: Any = import_module("triton.runtime.driver").driver.active
        stream_of, current = active.get_current_stream, active.get_current_device
        several = torch.cuda.device_count() > 1
        kernel, launch, programs, at = self.compiled, self.compiled.run, self.programs, self.device.index

        def launch_again(tensors: Sequence[Tensor | None]) -> None:
            hook = runtime.launch_enter_hook
            if getattr(hook, "calls", hook) or (several and current() != at):  # a profiler listens
                with torch.cuda.device(self.device):  # self keeps the tensors of `tail`, too
                    as_before(tensors)
            else:
                start = programs, 1, 1, stream_of(at), kernel.function, kernel.packed_metadata
                launch(*start, None, None, None, tensors, *tail)

        return launch_again


def _addresses(given: Any) -> Any:
    """The arguments, with an address for each tensor, which Triton's launcher reads faster."""
    if isinstance(given, tuple):
        return tuple(map(_addresses, given))
    return given.data_ptr() if isinstance(given, Tensor) else given


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    tensors: Sequence[Tensor | None],
    others: tuple[Any, ...],
    meta: Meta,
    warps: int,
    stages: int = 3,
) -> Launch:
    """Launch a kernel; `programs`: their number, which may be 0."""
    others = (*others, Meta(*map(import_module("triton.language").constexpr, meta)))
    options = {"num_warps": warps, "num_stages": stages, **FUSED}
    if not settings.compiles():
        knobs: Any = import_module("triton.knobs")
        knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook or _asked
    with torch.cuda.device(device) if device.type == "cuda" else _interpreter:
        compiled = kernel[(programs,)](tensors, *others, **options) if programs else None
        return Launch(kernel, compiled, programs, device, others, options)


def _asked(*, fn: Any, **more: Any) -> None:
    """Whether a kernel may be compiled: a hook of Triton's, called where this process has not compiled or loaded it."""
    if fn.module.startswith(__package__):
        refuse_compiling(f"Triton's kernel {fn.name} for this call")


def in_fitting_block(
    each: TritonKernel, problem: Problem, blocks: Sequence[BlockConfig], start: Callable[[BlockConfig], T]
) -> T:
    """What `start` returns of the first block whose resources fit."""
    errors: Any = import_module("triton.runtime.errors")
    for block in blocks[:-1]:
        tried = (each, block, problem.dtype, parts_of(problem.head_dim), problem.device)
        if tried in _too_large:
            continue
        # Triton may need more than estimated, and raises after compiling.
        try:
            return start(block)
        except errors.OutOfResources as error:
            logger.debug("%s with %s: %s", each.kernel, block, error)
            _too_large.add(tried)
    return start(blocks[-1])


def needs_wide_offsets(tensors: Sequence[Tensor]) -> bool:
    """Whether offsets within a head of a tensor [batch, len, heads, head_dim] need 64 bits."""
    return any((x.shape[1] - 1) * x.stride(1) + padded(x.shape[3]) * x.stride(3) >= OFFSET_LIMIT for x in tensors)


def as_float32(scale: float) -> float:
    """The scale clipped to float32's normal numbers; Triton would pass others as float64."""
    limits = torch.finfo(torch.float32)
    return math.copysign(min(abs(scale), limits.max / 2), scale) if abs(scale) >= limits.tiny else 0.0
