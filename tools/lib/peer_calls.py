"""Calls of other libraries: the problems of `python -m tools.bench peers`, and how each peer is asked for them.

A call takes q, k and v, each [batch, tokens, heads, head_dim], and returns out alike; views of these axes are the
peer's own layout. What can be made once, such as a mask, is made before and not timed.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import attend
from attn_dispatch.kernels.contract import Backend, adapted
from attn_dispatch.kernels.flex.mask import multiplicity_function
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

HEAD_DIM = 64
SEGMENTS, RATES = (2048, 4096, 8192), (1, 2, 4)
REACH = 1024  #: keys before a query's own that a window sees
SIDE = 13  #: tokens of a neighbourhood, on both axes


def neighborhood(tokens: int) -> Pattern:
    """Neighbourhoods as NATTEN cuts them at the borders, on a square grid."""
    side = math.isqrt(tokens)
    return Neighborhood((side, side), (SIDE, SIDE), edges="shift")


@dataclass(frozen=True)
class Asked:
    """A pattern for any number of tokens, its number of heads, and the numbers of tokens that are measured."""

    pattern: Callable[[int], Pattern]
    heads: int
    tokens: tuple[int, ...]
    trained: tuple[int, ...]  #: numbers of tokens of which the backward pass is measured too


PROBLEMS = {
    "dense causal": Asked(lambda tokens: Dense(is_causal=True), 4, (1024, 4096, 16384, 32768), (1024, 4096)),
    "window": Asked(lambda tokens: Window(REACH, 0), 4, (4096, 8192, 32768), (4096,)),
    "LongNet": Asked(lambda tokens: Dilated(SEGMENTS, RATES), 4, (8192, 32768), (8192,)),
    "LongNet, offsets in blocks": Asked(lambda tokens: Dilated(SEGMENTS, RATES, offsets="block"), 4, (8192,), (8192,)),
    # Of other numbers of heads fkodom's class leaves some out.
    "LongNet, heads split": Asked(lambda tokens: Dilated(SEGMENTS, RATES, heads="split"), 6, (8192,), (8192,)),
    "neighborhood": Asked(neighborhood, 4, (64**2, 128**2), (64**2,)),
}


class Cell(NamedTuple):
    """What is measured together, in the same rounds of one process."""

    name: str
    tokens: int
    dtype: str
    backward: bool

    def problem(self) -> Problem:
        asked = PROBLEMS[self.name]
        shape = (1, self.tokens, asked.heads, HEAD_DIM)
        pattern, dtype = asked.pattern(self.tokens), getattr(torch, self.dtype)
        return problem_of(shape, pattern, dtype, torch.device("cpu"), backward=self.backward)


@dataclass(frozen=True)
class Peer:
    """One way to compute the problems it names.

    `about` says what is called, and what serves a library's inner calls on a CPU. `differs` is how its function differs
    from the problem's; where it does, errors are against its own result in float64. `distribution` is the package.
    It is asked for `most_tokens`: more would take it seconds or gigabytes, or a compilation for each number.
    """

    name: str
    about: str
    problems: tuple[str, ...]
    make: Callable[[Problem], Call]
    distribution: str = "torch"
    most_tokens: int = 1 << 20
    differs: Callable[[Problem], str] = lambda problem: ""


def heads_first(call: Callable[..., Any]) -> Call:
    """A call of [batch, heads, tokens, head_dim] as one of this module."""
    return lambda q, k, v: call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def as_backend(name: str, call: Call) -> Backend:
    """A call as a backend, as far as examples and the oracle ask for one."""
    return adapted(SimpleNamespace(name=name, run=lambda q, k, v, problem, **_: call(q, k, v)))


def trained(call: Callable[[], Any], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A call with its backward pass."""

    def run() -> Any:
        out = call()
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


# --- attn-dispatch and PyTorch ----------------------------------------------------------------------------------------


def masked(problem: Problem) -> Call:
    return heads_first(partial(scaled_dot_product_attention, attn_mask=mask_of(problem)))


def mask_of(problem: Problem) -> Tensor:
    """The whole pattern, [1, 1 or heads, q_len, k_len]: bool, or the logarithm of counts over 1."""
    counted = isinstance(problem.pattern, Dilated)
    heads = problem.heads if counted else 1
    mask = torch.empty(1, heads, problem.q_len, problem.k_len, dtype=problem.dtype if counted else torch.bool)
    for start in range(0, problem.q_len, 256):
        stop = min(start + 256, problem.q_len)
        rows = torch.arange(start, stop)
        counts = problem.pattern.multiplicity(problem.q_len, problem.k_len, heads, q_pos=rows)
        mask[0, :, start:stop] = counts.float().log() if counted else counts > 0
    return mask


def _flex(problem: Problem) -> Call:
    library = importlib.import_module("torch.nn.attention.flex_attention")
    counts: Any = multiplicity_function(problem.pattern, problem.q_len, problem.k_len, problem.heads)
    dilated = isinstance(problem.pattern, Dilated)
    heads = problem.heads if dilated else None
    blocks = library.create_block_mask(
        lambda b, h, i, j: counts(h, i, j) > 0, None, heads, problem.q_len, problem.k_len, device="cpu"
    )

    def with_counts(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return score + counts(h, i, j).to(score.dtype).log()

    compiled: Any = torch.compile(library.flex_attention, dynamic=False)
    score_mod = with_counts if dilated else None
    return heads_first(lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=blocks))


# --- libraries --------------------------------------------------------------------------------------------------------


def _natten(problem: Problem) -> Call:
    na2d = importlib.import_module("natten.functional").na2d
    side = math.isqrt(problem.q_len)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grids = (x.view(x.shape[0], side, side, *x.shape[2:]) for x in (q, k, v))
        out: Tensor = na2d(*grids, kernel_size=(SIDE, SIDE))
        return out.flatten(1, 2)

    return call


def _local_attention(problem: Problem) -> Call:
    kind = importlib.import_module("local_attention").LocalAttention
    module = kind(REACH, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False)
    return heads_first(module)


def _torchscale(problem: Problem) -> Call:
    """Its module without projections."""
    dense: Any = importlib.import_module("torchscale.component.multihead_attention")
    kind = importlib.import_module("torchscale.component.dilated_attention").DilatedAttention
    dense.flash_attn_func = _flash_by_sdpa
    arguments = SimpleNamespace(
        multiway=False, xpos_rel_pos=False, flash_attention=True, layernorm_eps=1e-5,
        segment_length=list(SEGMENTS), dilated_ratio=list(RATES), seq_parallel=False,
    )  # fmt: skip
    module = kind(arguments, problem.heads * problem.head_dim, problem.heads, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, nn.Identity())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q.flatten(2), k.flatten(2), v.flatten(2))[0]
        return out.view(q.shape)

    return call


def _flash_by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: None, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """out and lse, as torchscale expects them of flash-attn, by the kernel that SDPA calls on a CPU."""
    first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*first, dropout, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def xformers_by_sdpa() -> dict[str, Any]:
    """Modules, by name, for what dilated-attention-pytorch imports of xFormers."""
    package: Any = ModuleType("xformers")
    package.ops = operators = ModuleType("xformers.ops")

    def by_sdpa(query: Tensor, key: Tensor, value: Tensor, op: object = None, attn_bias: object = None) -> Tensor:
        return heads_first(partial(scaled_dot_product_attention, is_causal=attn_bias is not None))(query, key, value)

    vars(operators).update(
        AttentionOp=object, LowerTriangularMask=type("LowerTriangularMask", (), {}), memory_efficient_attention=by_sdpa
    )
    return {"xformers": package, "xformers.ops": operators}


def _fkodom(problem: Problem) -> Call:
    sys.modules.update(xformers_by_sdpa())
    module = importlib.import_module("dilated_attention_pytorch.dilated_attention")
    attention: Call = module.DilatedAttention(SEGMENTS, RATES)
    return attention


def _detached(problem: Problem) -> str:
    return "passes no gradient through the weights of its branches" if problem.needs_grad else ""


def _divided(problem: Problem) -> str:
    return "divides each branch by its sum over the sequence, and all by the number of branches"


LONGNET, BY_SDPA = "LongNet", "; its dense calls are served by SDPA here"
ATTEND = "attn-dispatch"
PEERS = (
    Peer(
        ATTEND, "attend(), after its measurement", tuple(PROBLEMS),
        lambda problem: partial(attend, pattern=problem.pattern), "attn-dispatch",
    ),
    Peer(
        "SDPA", "scaled_dot_product_attention(is_causal=True)", ("dense causal",),
        lambda problem: heads_first(partial(scaled_dot_product_attention, is_causal=True)),
    ),
    Peer(
        "SDPA + mask", "scaled_dot_product_attention(attn_mask=...), the mask made before",
        ("window", LONGNET, "neighborhood"), masked, most_tokens=16_384,
    ),
    Peer(
        "FlexAttention", "torch.compile(flex_attention), the block mask made before",
        ("dense causal", "window", LONGNET, "neighborhood"), _flex, most_tokens=8192,
    ),
    Peer(
        "NATTEN", "na2d(), which takes FlexAttention, not compiled, on a CPU", ("neighborhood",), _natten,
        "natten", most_tokens=4096,
    ),
    Peer("local-attention", "LocalAttention(exact_windowsize=True)", ("window",), _local_attention, "local-attention"),
    Peer(
        "torchscale", f"DilatedAttention without its projections{BY_SDPA}", ("LongNet, offsets in blocks",),
        _torchscale, "torchscale", differs=_detached,
    ),
    Peer(
        "dilated-attention-pytorch", f"DilatedAttention{BY_SDPA}", ("LongNet, heads split",), _fkodom,
        "dilated-attention-pytorch", differs=_divided,
    ),
)  # fmt: skip


def peers_of(name: str) -> list[Peer]:
    """Those that compute this problem, attend() first."""
    return [peer for peer in PEERS if name in peer.problems]
