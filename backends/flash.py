"""The flash-attention libraries; the newest that supports the device is used: 4 (CuTe), 3 (Hopper), 2 (Ampere, newer).

Each forward returns lse; each backward takes the merged out and lse.

Source: Dao-AILab/flash-attention; checked against the source of flash-attn 2.7.0 to 2.8.3, the hopper folder of 2.8.3
and of 0251105 (2026-08), and flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import importlib.metadata
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.branches import flash4, hub
from attn_dispatch.kernels.branches.backend import Branched, Package, Variant
from attn_dispatch.kernels.contract import Refusal, Result
from attn_dispatch.kernels.dense import FLASH3, DenseCall, Drawn, Kernel, vector_aligned
from attn_dispatch.kernels.device_cache import is_noted, note, refuse_capture, refuse_compiling
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits
from attn_dispatch.kernels.numerics import with_positive_scale
from attn_dispatch.machine.devices import current_device
from attn_dispatch.spec.data import BlocksForm, Form
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import FEW_QUERIES

SPLIT_ROWS = 8192  #: of q, up to which flash-attn 3 may split the keys: `workspace_bytes` covers the parts' sums

Sides = tuple[int | None, int | None]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Generation(Kernel):
    """Base of the generations.

    Args:
        window: keys to the left and right of a query, None for all.
        softcap: 0 for none.
        documents: of one row: where each starts, and the last ends, int32 [documents + 1]; tokens of the longest.
        lengths: int32 [batch], the number of each row's keys in a forward pass, None for all.
        drawn: of dropout, in a backward pass.
    """

    window: Sides = (None, None)
    deterministic: bool = False
    softcap: float = 0.0
    documents: tuple[Tensor, int] | None = None
    lengths: Tensor | None = None
    drawn: Drawn | None = None

    grouped = packs = True
    tokens_first = True

    @classmethod
    def of(cls, problem: Problem) -> Generation:
        pattern = problem.pattern
        window = (pattern.left, pattern.right) if isinstance(pattern, Window) else (None, None)
        return cls(window, problem.deterministic, problem.softcap)

    def packed(self, lengths: tuple[int, ...], device: torch.device) -> Generation:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return replace(self, documents=(starts, max(2, *lengths)))  # 1: generation 2 would take a way of its own

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        op, windowed = self._forward(is_causal, scale), self.window != (None, None) or self.lengths is not None

        def run(q: Tensor, k: Tensor, v: Tensor, **dropped: float) -> tuple[Tensor, ...]:
            refuse_tangents("flash", q, k, v)
            if self.documents is None:
                out, lse, *others = op(q, k, v, **dropped)
            else:  # without the axis of the batch
                out, lse, *others = (x[None] for x in op(q[0], k[0], v[0])[:2])
            # Generation 2 returns inf for a query without keys.
            return out, lse.masked_fill(lse == math.inf, -math.inf) if windowed else lse, *others

        return run

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if self.window != (None, None):
            lse = lse.masked_fill(lse == -math.inf, math.inf)
        # The kernels assume contiguous lse.
        saved = *map(vector_aligned, (grad, *call[:3], out)), lse.contiguous()
        if self.documents is None:
            grads = replace(self, drawn=call.drawn)._backward(call.is_causal, call.scale, saved, grad_lse)
        else:
            of_row = tuple(x[0] for x in saved), None if grad_lse is None else grad_lse[0]
            grads = tuple(x[None] for x in self._backward(call.is_causal, call.scale, *of_row))
        return tuple(x[..., : call.q.shape[-1]] for x in grads)

    @abstractmethod
    def _forward(self, is_causal: bool, scale: float) -> Callable[..., Any]:
        """The library's function, bound to all but aligned q, k and v: out, lse and others."""

    @abstractmethod
    def _backward(self, is_causal: bool, scale: float, saved: Tensors, grad_lse: Tensor | None) -> Tensors:
        """`backward` of the gradient of out, and of q, k, v, out and lse, all aligned."""

    def _sides(self) -> tuple[int, int]:
        left, right = (-1 if side is None else side for side in self.window)
        return left, right

    def _lists(self) -> dict[str, Any]:
        """The arguments that say where documents are."""
        if self.documents is None:
            return {}
        starts, longest = self.documents
        return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


class Flash2(Generation):
    """flash-attn 2, by its extension: the interface's operators of Python take tens of microseconds more."""

    state_at = (1,)

    def _forward(self, is_causal: bool, scale: float) -> Callable[..., Any]:
        op, lists = extension2().fwd, [*self._lists().values()]
        given: Any = scale, is_causal, *self._sides(), self.softcap, False
        if lists:
            op, rows = (
                extension2().varlen_fwd,
                (None, *lists[:2], None, None, None, None, *lists[2:], 0.0, scale, False),
            )
            return lambda q, k, v: op(q, k, v, *rows, *given[1:], None)
        if self.lengths is not None:
            op, rows = extension2().fwd_kvcache, (None, None, self.lengths, *[None] * 7)
            return lambda q, k, v: op(q, k, v, *rows, *given, 0)
        return lambda q, k, v, dropout_p=0.0: op(q, k, v, None, None, dropout_p, *given, None)

    def _backward(self, is_causal: bool, scale: float, saved: Tensors, grad_lse: Tensor | None) -> Tensors:
        grads = _new_gradients(saved)
        op, lists = extension2().bwd, [*self._lists().values()]
        p, state = (self.drawn.p, *self.drawn.state) if self.drawn else (0.0, None)
        given: Any = None, p, scale, is_causal, *self._sides(), self.softcap, self.deterministic, None, state
        if lists:
            op = extension2().varlen_bwd
            given = *lists[:2], None, *lists[2:], 0.0, scale, False, *given[3:]
        op(*saved, *grads, *given)
        return grads


class Flash3(Generation):
    """flash-attn 3, by its ops, whose arguments are more stable than those of its Python functions."""

    def _forward(self, is_causal: bool, scale: float) -> Callable[..., Any]:
        op, options = operators3().fwd.default, self._options(is_causal, scale, seqused_k=self.lengths)
        # 0: as many parts of the keys as its heuristic finds, summed in a fixed order.
        return lambda q, k, v: op(q, k, v, num_splits=int(q.shape[:-1].numel() > SPLIT_ROWS), **options)

    def _backward(self, is_causal: bool, scale: float, saved: Tensors, grad_lse: Tensor | None) -> Tensors:
        grads, options = _new_gradients(saved), self._options(is_causal, scale)
        operators3().bwd(*saved, *grads, deterministic=self.deterministic, **options)
        return grads

    def _options(self, is_causal: bool, scale: float, **more: Any) -> dict[str, Any]:
        window = dict(zip(("window_size_left", "window_size_right"), self._sides()))
        more = more | self._lists()
        return {"softmax_scale": scale, "is_causal": is_causal, "softcap": self.softcap, **window, **more}


class Flash4(Generation):
    """flash-attn 4; an open window side is None. It launches on the current device, wherever its tensors are."""

    def _forward(self, is_causal: bool, scale: float) -> Callable[..., Any]:
        options = self._options(is_causal, scale) | {"seqused_k": self.lengths}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            with current_device(q.device):
                return flash4.library()._flash_attn_fwd(q, k, v, return_lse=True, **options)

        return run

    def _backward(self, is_causal: bool, scale: float, saved: Tensors, grad_lse: Tensor | None) -> Tensors:
        options = self._options(is_causal, scale) | {"deterministic": self.deterministic}
        options |= {} if grad_lse is None else {"dlse": grad_lse.contiguous()}
        grad, *qkv, out, lse = saved
        with current_device(grad.device):
            dq, dk, dv, *_ = flash4.library()._flash_attn_bwd(*qkv, out, grad, lse, **options)
        return dq, dk, dv

    def _options(self, is_causal: bool, scale: float) -> dict[str, Any]:
        window = dict(zip(("window_size_left", "window_size_right"), self.window))
        return {"softmax_scale": scale, "causal": is_causal, "softcap": self.softcap, **window, **self._lists()}


@dataclass(frozen=True)
class Flash4OfBlocks(Flash4):
    """flash-attn 4 forward, over the blocks of a table; `lists` are those of `flash4.block_lists`.

    Its lists of blocks in part, which need a function that masks them, are empty. A backward pass takes the transposed
    lists, in other sizes for each head_dim, and was never held to float64 here.
    """

    lists: Tensors = ()
    size: tuple[int, int] = (flash4.TILE, flash4.TILE)

    def _options(self, is_causal: bool, scale: float) -> dict[str, Any]:
        count, number = self.lists
        some = torch.zeros_like(count), torch.zeros_like(number[..., :1])
        blocks = flash4.library().BlockSparseTensorsTorch(*some, count, number, block_size=self.size)
        return super()._options(is_causal, scale) | {"block_sparse_tensors": blocks, "pack_gqa": False}


class Flash4OfBoth(Flash4):
    """flash-attn 4 where its backward pass takes the gradient of lse."""

    takes_grad_lse = True


def _new_gradients(saved: Tensors) -> Tensors:
    """Memory for dq, dk and dv."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[1:4])


def extension2() -> Any:
    """What flash-attn 2 is compiled to: the operators of a build of the Hub, or as its interface imports it, by the
    first name since 2.7.2.
    """
    library = PACKAGE2.load()
    return getattr(library, "flash_attn_gpu", None) or getattr(library, "flash_attn_cuda", library)


def operators3() -> Any:
    """Those of flash-attn 3: of a build of the Hub, else by the name that its own build registers."""
    return PACKAGE3.load() if isinstance(PACKAGE3, hub.Build) else torch.ops.flash_attn_3


FLASH2 = Limits("cuda", dict.fromkeys(HALF, (8, 0)), head_dim=256, dropout=True, most_rows=LARGEST_GRID)
# Kernels of their own; the backward pass has neither windows, a softcap nor a gradient of lse.
BLACKWELL_256 = flash4.BLACKWELL._replace(head_dim=256, least_head_dim=256, grad_lse=False, softcap=False)
# Those of Ampere, in less shared memory.
GEFORCE = flash4.BLACKWELL._replace(dtypes=dict.fromkeys(HALF, (12, 0)), highest=(12, 1), repeatable_head_dim=0)

BLOCKS = flash4.HOPPER._replace(highest=(11, 0), head_dim=128)

PACKAGE2 = hub.build("flash_attn2") or Package(
    "flash-attn", "pip install 'attn-dispatch[flash]'", "flash_attn.flash_attn_interface", (2, 7)
)
PACKAGE3 = hub.build("flash_attn3") or Package(
    "flash_attn_3", "it is built from flash-attention's hopper folder", "flash_attn_3._C", (3,)
)


def ignores_deterministic(operators: Any) -> str:
    """Those before 2025-09 do; builds before 2025-11 return the gradients, too."""
    returned = operators3().bwd.default._schema.returns
    return "" if len(returned) == 5 else "it is older than 2025-11 and may have no deterministic backward pass"


REPEATABLE3 = PACKAGE3._replace(fault=ignores_deterministic)


def version() -> str:
    """The versions of all installed generations: which one runs depends on the problem.

    Raises:
        PackageNotFoundError: none is installed.
    """
    found = []
    for package in (flash4.PACKAGE, PACKAGE3, PACKAGE2):
        try:
            found.append(f"{package.distribution} {package.version()}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise importlib.metadata.PackageNotFoundError(PACKAGE2.distribution)
    return ", ".join(found)


_PATTERNS = (Dense, Dilated, Window)


def refuse_both(problem: Problem) -> list[Refusal]:
    both = problem.dropout_p and problem.softcap
    return [Refusal("dropout", "caps scores or drops weights, not both")] if both else []


BACKEND = Branched(
    "flash",
    (
        Variant(flash4.BLACKWELL, Flash4OfBoth.of, "flash-attn 4 on Blackwell", flash4.PACKAGE, _PATTERNS),
        Variant(BLACKWELL_256, Flash4.of, "flash-attn 4 on Blackwell with head_dim 256", flash4.PACKAGE),
        Variant(flash4.HOPPER, Flash4OfBoth.of, "flash-attn 4 on Hopper", flash4.PACKAGE, _PATTERNS),
        Variant(FLASH3, Flash3.of, "flash-attn 3", REPEATABLE3, _PATTERNS),
        Variant(FLASH3._replace(repeatable_head_dim=0), Flash3.of, "an older flash-attn 3", PACKAGE3, _PATTERNS),
        Variant(FLASH2, Flash2.of, "flash-attn 2", PACKAGE2, _PATTERNS),
        # Last: flash-attn 2 has kernels built for these devices.
        Variant(GEFORCE, Flash4OfBoth.of, "flash-attn 4 on GeForce", flash4.PACKAGE, _PATTERNS),
    ),
    version,
    refuse_both,
)
#: Of patterns that hold tensors.
OVER_BLOCKS = Branched(
    "flash", (Variant(BLOCKS, Flash4OfBlocks.of, "", flash4.PACKAGE, (BlocksForm,)),), version, flash4.refuse_blocks
)

name, partial = BACKEND.name, BACKEND.partial
run_documents, takes_documents = BACKEND.run_documents, BACKEND.takes_documents
shares_builds = specialized_trains = takes_data = True
score_terms = ("softcap",)


def _for(problem: Problem) -> Branched:
    return OVER_BLOCKS if isinstance(problem.pattern, Form) else BACKEND


def refusals(problem: Problem) -> list[Refusal]:
    return _for(problem).refusals(problem)


def flops(problem: Problem) -> int:
    return _for(problem).flops(problem)


def workspace_bytes(problem: Problem) -> int:
    return _for(problem).workspace_bytes(problem) + flash4.block_list_bytes(problem)


def first_call_ms(problem: Problem, by_rows: bool = False) -> float:
    """Estimated compile time of flash-attn 4 with an empty cache; 0 if this process has such kernels."""
    compiles = isinstance(_for(problem).kernel(problem), Flash4) and not is_noted(name, problem, by_rows)
    return flash4.COMPILE_MS if compiles else 0.0


def takes_key_lens(problem: Problem) -> bool:
    """The newer generations need a copy of the values, which takes longer than a decoding step itself."""
    quick = isinstance(BACKEND.kernel(problem), Flash2) or problem.q_len > FEW_QUERIES
    return quick and not problem.needs_grad and not problem.pattern.branches and not problem.dropout_p


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, key_lens: Any = None, **tensors: Tensor) -> Result:
    by_rows = key_lens is not None
    if first_call_ms(problem, by_rows):
        refuse_capture(problem.device)
        refuse_compiling("flash-attn 4's kernels for this call")
    found: Result
    if isinstance(problem.pattern, Form):
        found = _over_blocks(q, k, v, problem, tensors["pattern_data"])
    elif by_rows:
        found = _by_rows(q, k, v, problem, key_lens)
    else:
        found = BACKEND.run(q, k, v, problem, **tensors)
    note(name, problem, by_rows)
    return found


def _over_blocks(q: Tensor, k: Tensor, v: Tensor, problem: Problem, data: Tensor) -> tuple[Tensor, Tensor]:
    kernel, form = OVER_BLOCKS.kernel(problem), problem.pattern
    assert isinstance(kernel, Flash4OfBlocks)
    assert isinstance(form, BlocksForm)
    kernel = replace(kernel, lists=flash4.block_lists(problem, data), size=(form.size[0], flash4.TILE))
    q, problem = with_positive_scale(q, problem)
    return kernel.forward(DenseCall(q, k, v, False, problem.scale))


def _by_rows(q: Tensor, k: Tensor, v: Tensor, problem: Problem, key_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels read values of weight 0, which may be NaN: before windows and, but for generation 2, after the end."""
    kernel: Any = BACKEND.kernel(problem)
    q, problem = with_positive_scale(q, problem)
    lengths, left = key_lens.clamp(0, problem.k_len).int(), kernel.window[0]
    if left is not None or not isinstance(kernel, Flash2):
        place, end = torch.arange(problem.k_len, device=q.device), lengths[:, None]
        first = end - problem.q_len - (problem.k_len if left is None else left)
        v = v.masked_fill(((place < first) | (place >= end))[:, :, None, None], 0.0)
    call = DenseCall(q, k, v, getattr(problem.pattern, "is_causal", False), problem.scale)
    return replace(kernel, lengths=lengths).forward(call)  # type: ignore[no-any-return]


def specialized(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False
) -> Callable[..., Result] | None:
    """As of `Branched`; none where the first call is to compile, which `run` notes."""
    return None if first_call_ms(problem) else BACKEND.specialized(problem, q, k, v, heads_first=heads_first)
