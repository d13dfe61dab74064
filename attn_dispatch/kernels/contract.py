"""The backend interface, and refusals: why a backend cannot run a problem."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.machine.devices import missing_code
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.groups import SCORE_TERMS as _FIELDS
from attn_dispatch.spec.orders import NATURAL, ORDERS
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem

Result = Tensor | tuple[Tensor, Tensor]
REQUIRED = ("name", "version", "refusals", "workspace_bytes", "run")
SCORE_TERMS = tuple(_FIELDS)  #: what a call may do to the scores besides scaling them


class Refusal(NamedTuple):
    """Why a backend cannot run a problem.

    Args:
        code: `not_installed`, `over_memory`, or the unsupported property (`dtype`, `pattern`, ...).
        text: the reason, with the number and its limit.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


class Backend:
    """An implementation of attention, as the package sees it: `adapted` makes one of any object or module.

    Required are `name`, `version`, `refusals`, `workspace_bytes` and `run`. An object may have any of the others:

    * `flops(problem) -> int`: floating-point operations of one call; a trial that cannot end within the budget is not
      started.
    * `first_call_ms(problem) -> float`: estimated extra milliseconds of the first call, such as compiling; 0 if already
      compiled. A trial is not started if this alone exceeds the budget.
    * `shares_builds: bool`: what `first_call_ms` counts is kept on disk and serves other problems too. It is not held
      against the budget where the hard cases of the problem's class have passed on this machine. Without it, a backend
      with `first_call_ms` is taken for one of torch.compile, whose tracing must not find NaN in new memory.
    * `prepare()`: work done once per machine for all problems, such as compiling a library. Called before the first
      trial, outside its budget; if it raises, the candidate fails.
    * `prepared() -> bool`: whether `prepare` would return at once; by default it would not. A trial that is taken
      between calls of the program leaves out a backend that is still to be prepared.
    * `forget(problem)`: frees memory held for one problem, and no other's: kernels and CUDA graphs may read that.
      Called after a trial that another candidate won.
    * `release()`: frees memory that trials left. Called after every trial of a backend without `forget`.
    * `orders(problem) -> Sequence[str]`: the token or visit orders (see `orders.ORDERS`) to try, each a candidate of
      its own; default: natural order alone. Called only where `refusals` is empty.
    * `all_orders: tuple[str, ...]`: more orders that a caller may force, though they are seldom faster.
    * `partial(problem, key_mask=None) -> autograd.Passes`: its passes for queries that also see other keys: forward
      returns out and lse over these keys, backward takes out and lse over all keys. The scale is above 0, and rows
      with lse = inf have weight 0. Sequences over many ranks are computed with it, by the backends that `SOLVERS` in
      ring/engine/parts.py lists: it is not asked of other packages' yet.
    * `traceable(problem) -> bool`: its forward pass consists of PyTorch's operators, so that a traced graph computes
      out and lse of other inputs, with autograd's gradients. Other backends do not run while torch.export or make_fx
      trace.
    * `run_documents(q, k, v, problem, lengths, **tensors) -> Result`: what `run` does for packed rows, of which each
      holds documents of these lengths in tokens, 1 or more: every document by itself. `problem` is that of the rows,
      with the pattern of the documents, `Dense`, `Window` or `Dilated`, and without a bias. Without it, documents of
      one length are a call.
    * `takes_documents(problem) -> bool`: whether `run_documents` takes one that `run` takes; True by default.
    * `takes_key_lens(problem) -> bool`: `run` takes `key_lens`, too, for a problem of `Dense` or `Window` that is
      not refused: int32 or int64 [batch] on the device, of any values. A row is computed as by a call with so many
      of its first keys, from none to all. Without it, the host reads them, and rows of one length are a call.
    * `score_terms: Collection[str]`: those of `SCORE_TERMS` that it computes; by default none. Problems with others are
      refused for it.
    * `takes_data: bool`: it is asked about patterns that hold tensors, which `run` gets as `pattern_data`. Problems
      have their forms (`spec.data`); others refuse them.
    * `specialized(problem, q, k, v, heads_first=False) -> Callable | None`: a function of q, k, v and problem that does
      what `run` does, with the same bits, for calls without other tensors and gradients whose q, k and v have these
      shapes, strides and dtypes; what depends on those alone is done once. With `heads_first`, q, k, v and out are
      [batch, heads, len, head_dim]. None where it gains nothing. Trials measure and check it in the place of `run`.
    * `specialized_trains: bool`: it is asked of calls with gradients too.
    * `configuration(problem) -> str`: how it is set for a problem on this machine; `explain` shows it.

    `run`, and what it returns for the backward pass, are called by several threads at once, and in inference mode.
    In an order other than the natural one, `run` gets `order=` and permutes inside: it takes and returns tokens in the
    caller's order. `workspace_bytes` and the like hold for every order.
    """

    name: str  #: short, unique and stable: decisions store it
    score_terms: Collection[str] = ()
    takes_data: bool = False
    all_orders: tuple[str, ...] = ()
    shares_builds: bool = False
    flops: Callable[..., float] | None = None
    first_call_ms: Callable[..., float] | None = None
    prepare: Callable[..., object] | None = None
    forget: Callable[..., object] | None = None
    traceable: Callable[..., bool] | None = None
    partial: Callable[..., Passes] | None = None
    run_documents: Callable[..., Result] | None = None
    takes_key_lens: Callable[..., bool] | None = None
    specialized: Callable[..., Callable[..., Result] | None] | None = None
    specialized_trains: bool = False
    configuration: Callable[..., str] | None = None

    def version(self) -> str:
        """Everything that its speed and results depend on; a new version is measured anew."""
        raise NotImplementedError

    def refusals(self, problem: Problem) -> list[Refusal]:
        """Every reason why it cannot run the problem; empty if it can."""
        raise NotImplementedError

    def workspace_bytes(self, problem: Problem) -> int:
        """Upper bound of the memory it allocates besides q, k, v, out and their gradients."""
        raise NotImplementedError

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Result:
        """Compute.

        Args:
            q: [batch, q_len, heads, head_dim]; any strides. k, v: [batch, k_len, kv_heads, head_dim].
            problem: the checked call without its data.
            tensors: `seq_lens`, `key_mask`, `bias`, `alibi_slopes`, `pattern_data`, where the problem has them;
                `order=`, where it is not the natural one.

        Returns:
            out as q, or (out, lse) with lse [batch, heads, q_len] in float32 (float64 for float64 inputs). lse is
            required where `problem.return_lse`. Autograd must work where `problem.needs_grad`.
        """
        raise NotImplementedError

    def orders(self, problem: Problem) -> Collection[str]:
        return (NATURAL,)

    def prepared(self) -> bool:
        return self.prepare is None

    def takes_documents(self, problem: Problem) -> bool:
        return True

    def release(self) -> None: ...


class _Adapted(Backend):
    """The members of any object, and the defaults of those that it has not."""

    def __init__(self, given: object) -> None:
        self.given = given

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        return own(name) if name in ("given", "__class__") else getattr(own("given"), name, None) or own(name)


def missing_members(given: object) -> str:
    """Which required members an object lacks, and what it needs; empty if it lacks none."""
    missing = [part for part in REQUIRED if not hasattr(given, part)]
    return f"lacks {', '.join(missing)}; it needs {', '.join(REQUIRED)}" if missing else ""


def adapted(given: Any) -> Backend:
    """A backend of an object or module with the required members."""
    return given if isinstance(given, Backend) else _Adapted(given)


def orders_of(backend: Backend, problem: Problem) -> tuple[str, ...]:
    """The orders to try a backend in, natural order first. Exceptions of `backend.orders` propagate.

    Raises:
        ValueError: `backend.orders` names an unknown order.
    """
    return _known(backend.orders(problem))


def forced_orders(backend: Backend, problem: Problem) -> tuple[str, ...]:
    """`orders_of`, and the orders in which a backend runs only if forced. Raises as `orders_of`."""
    return _known([*orders_of(backend, problem), *backend.all_orders])


def traceable(backend: Backend, problem: Problem) -> bool:
    """Whether a graph traced through the backend is valid for other inputs."""
    return backend.traceable is not None and bool(backend.traceable(problem))


def traces(backend: Backend) -> bool:
    """Whether the backend is one of torch.compile."""
    return backend.first_call_ms is not None and not backend.shares_builds


def runner(backend: Backend, order: str, problem: Problem, tensors: tuple[Tensor, ...] | None) -> Callable[..., Result]:
    """The backend's `run` with the order bound, or `specialized` for q, k and v like these tensors."""
    run: Callable[..., Result] = backend.run
    found = None if tensors is None else specialized(backend, order, problem, tensors)
    return found or (run if order == NATURAL else partial(run, order=order))


def asks_specialized(backend: Backend, problem: Problem) -> bool:
    """Whether `specialized` is asked: of calls without tensors besides q, k and v, and without dropout."""
    odd = problem.dropout_p or problem.masked or problem.score_terms or isinstance(problem.pattern, Form)
    odd = odd or (problem.needs_grad and not backend.specialized_trains)
    return backend.specialized is not None and not odd


def specialized(
    backend: Backend, order: str, problem: Problem, tensors: tuple[Tensor, ...], *, heads_first: bool = False
) -> Callable[..., Result] | None:
    """What the backend's `specialized` gives for q, k and v like these; None where it cannot be asked."""
    if backend.specialized is None or order != NATURAL or not asks_specialized(backend, problem):
        return None
    return backend.specialized(problem, *tensors, heads_first=heads_first)


def _known(named: Collection[str]) -> tuple[str, ...]:
    unknown = [order for order in named if order not in ORDERS]
    if unknown:
        raise ValueError(f"orders are {', '.join(ORDERS)}, not {unknown[0]!r}")
    return tuple(order for order in ORDERS if order in named)


def refusals_of(backend: Backend, problem: Problem) -> list[Refusal]:
    """The backend's refusals, after what keeps every backend from the problem's device, and it from what it has not."""
    why = missing_code(problem.device)
    missing = [Refusal("device", why)] if why else []
    data = refuse_data(backend, problem)
    return [*missing, *(data or [*refuse_score_terms(backend, problem), *backend.refusals(problem)])]


def refuse_data(backend: Backend, problem: Problem) -> list[Refusal]:
    """The refusal of a pattern that holds tensors, for a backend without `takes_data`, which need not know forms."""
    if not isinstance(problem.pattern, Form) or backend.takes_data:
        return []
    return [Refusal("pattern", f"takes no tensors of a pattern: {problem.pattern}")]


def refuse_score_terms(backend: Backend, problem: Problem) -> list[Refusal]:
    """Refusals of what a call does to the scores and the backend does not declare."""
    missing = [name for name in problem.score_terms if name not in backend.score_terms]
    return [Refusal("scores", f"does not compute {', '.join(missing)}")] if missing else []


def refuse_dtype(problem: Problem, allowed: Collection[torch.dtype]) -> list[Refusal]:
    if problem.dtype in allowed:
        return []
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in allowed))
    return [Refusal("dtype", f"computes in {names}, not {str(problem.dtype).removeprefix('torch.')}")]


def refuse_pattern(problem: Problem, allowed: tuple[type[Pattern], ...]) -> list[Refusal]:
    if isinstance(problem.pattern, allowed):
        return []
    names = ", ".join(kind.__name__.removesuffix("Form") for kind in allowed)
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
