"""What a backend is, and how it says no."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from attn_dispatch.spec.orders import NATURAL, ORDERS
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem

Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend cannot run a problem.

    Args:
        code: one of `not_installed`, `over_memory`, or the name of what is not supported (`dtype`, `pattern`, ...).
        text: a sentence that names the number and its limit.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@runtime_checkable
class Backend(Protocol):
    """One way to compute attention. A module with these names will do.

    More are looked for and may be missing:

    * `flops(problem) -> int`: the work it will do, in operations, so that a trial that cannot end within the budget is
      not started.
    * `first_call_ms(problem) -> float`: an estimate of what its first call takes beyond a later one, in milliseconds,
      such as compiling; 0 where that is done. A trial that this alone would take past the budget is not started.
    * `prepare()`: does what has to be done once on a machine, whatever the problem, such as compiling a library. Called
      before the first trial, outside its budget; if it fails, so does the candidate.
    * `forget(problem)`: drops what it keeps for one problem. Called after a trial that it did not win.
    * `release()`: drops what trials left behind. Called after every trial where there is no `forget`.
    * `orders(problem) -> Sequence[str]`: the orders of tokens or visits (see `order.ORDERS`) in which it offers to be
      tried, each a candidate of its own; the natural one alone where this is missing. Asked only where there are no
      refusals.
    * `partial(problem, key_mask=None) -> recorded.Call`: its two passes by themselves, for queries that see keys
      elsewhere too: forward gives out and lse over these keys, backward is handed out and lse over all of them. The
      scale is above 0, and rows with lse = inf weigh nothing. Sequences over many ranks are worked out with it.
    * `traceable(problem) -> bool`: its forward pass is made of PyTorch's operators: a graph of them computes out and
      lse of other inputs, with autograd's own gradients. Others are not run while torch.export or make_fx trace.
    * `all_orders: tuple[str, ...]`: more orders in which a caller may force it, though they hardly pay.

    Where an order is not the natural one, `run` is handed its name as `order=` and permutes inside: it gets tokens in
    the caller's order and returns results in it. What it says of a problem, such as `workspace_bytes`, holds for every
    order.
    """

    @property
    def name(self) -> str:
        """Short, unique, stable: it is what is stored."""
        ...

    def version(self) -> str:
        """What its speed and results depend on; a new version is measured anew."""
        ...

    def refusals(self, problem: Problem) -> list[Refusal]:
        """Every reason why it cannot run the problem; empty where it can."""
        ...

    def workspace_bytes(self, problem: Problem) -> int:
        """Upper bound of the memory it takes beyond q, k, v, out and their gradients."""
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Result:
        """Compute.

        Args:
            q: [batch, q_len, heads, head_dim]; any strides. k, v: [batch, k_len, kv_heads, head_dim].
            problem: what was checked; everything but the data.
            tensors: `seq_lens` and `key_mask`, where the problem has them; and `order=`, of a backend with `orders`
                that runs in another than the natural one.

        Returns:
            out as q, or (out, lse) with lse [batch, heads, q_len] in float32 (float64 for float64 inputs). lse is
            needed where `problem.return_lse`. Ordinary autograd must pass through where `problem.needs_grad`.
        """
        ...


def orders_of(backend: Backend, problem: Problem) -> tuple[str, ...]:
    """The orders in which a backend offers to be tried, the natural one first. What it raises is passed on.

    Raises:
        ValueError: it names an order that there is not.
    """
    offer = getattr(backend, "orders", None)
    return (NATURAL,) if offer is None else _known(offer(problem))


def forced_orders(backend: Backend, problem: Problem) -> tuple[str, ...]:
    """Those, and the orders in which a backend runs only where it is forced to. Raises as `orders_of`."""
    return _known([*orders_of(backend, problem), *getattr(backend, "all_orders", ())])


def traceable(backend: Backend, problem: Problem) -> bool:
    """Whether a graph that is traced through it holds for other inputs."""
    said = getattr(backend, "traceable", None)
    return said is not None and bool(said(problem))


def runner(backend: Backend, order: str) -> Callable[..., Result]:
    """The backend's `run` in an order."""
    run: Callable[..., Result] = backend.run
    return run if order == NATURAL else partial(run, order=order)


def _known(named: Collection[str]) -> tuple[str, ...]:
    unknown = [order for order in named if order not in ORDERS]
    if unknown:
        raise ValueError(f"orders are {', '.join(ORDERS)}, not {unknown[0]!r}")
    return tuple(order for order in ORDERS if order in named)


def refuse_dtype(problem: Problem, allowed: Collection[torch.dtype]) -> list[Refusal]:
    if problem.dtype in allowed:
        return []
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in allowed))
    return [Refusal("dtype", f"computes in {names}, not {str(problem.dtype).removeprefix('torch.')}")]


def refuse_pattern(problem: Problem, allowed: tuple[type[Pattern], ...]) -> list[Refusal]:
    if isinstance(problem.pattern, allowed):
        return []
    names = ", ".join(kind.__name__ for kind in allowed)
    return [Refusal("pattern", f"computes {names}, not {problem.pattern}")]


def refuse_sinks(problem: Problem) -> list[Refusal]:
    if getattr(problem.pattern, "sinks", 0) == 0:
        return []
    return [Refusal("pattern", f"computes one run of keys for each query, without the sinks of {problem.pattern}")]


def refuse_device(problem: Problem, allowed: Collection[str]) -> list[Refusal]:
    if problem.device.type in allowed:
        return []
    return [Refusal("device", f"runs on {', '.join(allowed)}, not {problem.device.type}")]


def refuse_dropout(problem: Problem) -> list[Refusal]:
    return [Refusal("dropout", f"has no dropout, asked for {problem.dropout_p:g}")] if problem.dropout_p else []


def refuse_ranks(problem: Problem) -> list[Refusal]:
    if problem.ranks == 1:
        return []
    return [Refusal("mesh", f"runs on one rank, the sequence is sharded over {problem.ranks}")]
