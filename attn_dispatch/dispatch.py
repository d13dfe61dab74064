"""attend(): a call becomes a Problem, the Problem a decision, the decision a backend's run.

On a hit the way is one look-up: the signature of a call that was seen before leads straight to its route.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from attn_dispatch import order as orders
from attn_dispatch import registry
from attn_dispatch.candidates import Candidate, candidates, heuristic, versions
from attn_dispatch.contract import Result
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.explanation import Explanation
from attn_dispatch.machine import provenance, silicon
from attn_dispatch.pattern import Pattern
from attn_dispatch.problem import Problem, autocast_dtype, check_seq_lens_values
from attn_dispatch.store import Decision, Row, Store, cache_folder, note_missed, shipped

MODES = ("tune", "predict", "locked", "off")
DEFAULT_BUDGET_MS = 2000.0
MOST_ROUTES = 65536  #: signatures remembered; past this the table starts anew, decisions stay

logger = logging.getLogger("attn_dispatch")


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls of one signature go. `plain`: straight to `run`, nothing to prepare."""

    run: Callable[..., Result]
    problem: Problem
    backend: str
    plain: bool
    transposed: bool
    cast: torch.dtype | None


# One question instead of one for each kind of device, on every call.
_any_autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
)
# Not failures of a backend: a wrong argument, and how checkpointing ends a recomputation early.
_THROUGH = (InvalidInput, getattr(checkpoint, "_StopRecomputationError", InvalidInput))
_routes: dict[Any, Route] = {}
_decided: dict[Problem, Decision] = {}
_counts: Counter[str] = Counter()
_lock = threading.RLock()
_observers: list[Callable[[Problem], None]] = []


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    segment_lengths: Iterable[int] | None = None,
    dilation_rates: Iterable[int] | None = None,
    is_causal: bool = False,
    seq_lens: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bnhd",
    backend: str | None = None,
    order: str | None = None,
    mesh: object = None,
    return_lse: bool = False,
) -> Any:
    """Attention, by the fastest way known on this machine.

    The first call of an unseen problem measures the backends that can run it and keeps the decision on disk; later
    calls, in this process and the next, are routed by it. `$ATTN_DISPATCH_MODE` changes that.

    Args:
        q: [batch, q_len, heads, head_dim], float16, bfloat16, float32 or float64; any strides.
        k, v: [batch, k_len, kv_heads, head_dim]; kv_heads divides heads.
        pattern: `Dense`, `Window`, `Dilated` or `Neighborhood`; or use the shorthands below, not both.
        segment_lengths, dilation_rates: tokens per segment and rate of each branch of `Dilated`.
        is_causal: keys after the query are not seen; the last query lines up with the last key.
        seq_lens: [batch] int32 or int64: tokens at and past a row's length are padding.
        key_mask: [batch, k_len] bool, True where a key may be seen.
        dropout_p: probability with which an attention weight is dropped; 0 <= dropout_p < 1.
        scale: factor of the scores; `head_dim ** -0.5` by default.
        layout: "bnhd", or "bhnd" for q, k, v and out with their middle axes swapped.
        backend, order: run with this one; it does or the call fails.
        mesh: 1-D DeviceMesh or process group over whose ranks the sequence is sharded.
        return_lse: also return lse.

    Returns:
        out as q; or (out, lse) with lse [batch, heads, q_len], natural log, float32 (float64 for float64 inputs),
        -inf where a query sees no key. Gradients pass through both.

    Raises:
        InvalidInput: an argument is wrong. NoBackend: none can run this. BackendFailed: the chosen one raised.
        NotDecided: locked mode met an unseen problem.
    """
    if torch.compiler.is_compiling():
        return _outside_graph(
            q, k, v, pattern, segment_lengths=segment_lengths, dilation_rates=dilation_rates, is_causal=is_causal,
            seq_lens=seq_lens, key_mask=key_mask, dropout_p=dropout_p, scale=scale, layout=layout, backend=backend,
            order=order, mesh=mesh, return_lse=return_lse,
        )  # fmt: skip
    signature: Any = None
    try:
        signature = (
            q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
            k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
            pattern, segment_lengths, dilation_rates, is_causal, dropout_p, scale, layout, backend, order, mesh,
            return_lse,
            None if seq_lens is None else (seq_lens.shape, seq_lens.dtype, seq_lens.device),
            None if key_mask is None else (key_mask.shape, key_mask.dtype, key_mask.device),
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            q.dtype is torch.float32 and torch.get_float32_matmul_precision(),
            _any_autocast() and _autocast(),
        )  # fmt: skip
        route: Route | None = _routes[signature]
    except (KeyError, TypeError, AttributeError, RuntimeError):
        route = None  # found outside the handler, so that its errors stand alone
    if route is None:
        arguments = {
            "segment_lengths": _frozen(segment_lengths), "dilation_rates": _frozen(dilation_rates),
            "is_causal": is_causal, "seq_lens": seq_lens, "key_mask": key_mask, "dropout_p": dropout_p,
            "scale": scale, "layout": layout, "mesh": mesh, "return_lse": return_lse,
        }  # fmt: skip
        if arguments["segment_lengths"] is not segment_lengths or arguments["dilation_rates"] is not dilation_rates:
            # Lists have no hash; the same call with tuples has.
            return attend(q, k, v, pattern, backend=backend, order=order, **arguments)
        problem = Problem.of(q, k, v, pattern, **arguments)
        route = _new_route(signature, q, problem, layout, backend, order)
    if not route.plain:
        return _run_prepared(route, q, k, v, seq_lens, key_mask, return_lse)
    try:
        result = route.run(q, k, v, route.problem)
    except _THROUGH:
        raise
    except Exception as error:
        raise _failed(route, error) from error
    if return_lse:
        return _with_lse(route, result)
    return result[0] if type(result) is tuple else _parts(route, result)[0]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    backend: str | None = None,
    order: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Which backend and order `attend` takes for these arguments, and why not the others. Runs nothing.

    Takes what `attend` takes, and meta tensors too: they are explained for the CUDA device if there is one, else for
    the CPU.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if "device" in arguments:
        raise InvalidInput("explain takes attend's arguments, which have no device")
    return explain_problem(Problem.of(q, k, v, pattern, **arguments), backend, order)


def explain_problem(problem: Problem, backend: str | None = None, order: str | None = None) -> Explanation:
    """`explain` for a problem."""
    if order is not None:
        orders.check(order)
    if backend is not None:
        return Explanation.of(_forced(problem, backend))
    decision = _decided.get(problem)
    if decision is None and mode() != "off":
        decision = stored(problem)
    return Explanation.of(decision or _heuristic(problem, candidates(problem)))


def counters() -> dict[str, int]:
    """How this process came by its decisions: `measured`, `loaded` from disk, `shipped`, `heuristic`, `forced`."""
    return {name: _counts[name] for name in ("measured", "loaded", "shipped", "heuristic", "forced")}


def stored(problem: Problem) -> Decision | None:
    """The decision on disk, or the shipped one, if it was made among the backends there are now."""
    where = silicon(problem.device)
    key = problem.key(where)
    now = versions()
    for decision in (Store(cache_folder()).get(where, key), shipped(where).get(key)):
        if decision is not None and decision.versions == now and _can_run(problem, decision.choice):
            return decision
    return None


def adopt(problem: Problem, decision: Decision) -> None:
    """Route the problem by this decision from now on, and keep it."""
    with _lock:
        Store(cache_folder()).put(decision)
        _decided[problem] = decision
        _counts["measured"] += 1
        _routes.clear()


@contextmanager
def observing(observer: Callable[[Problem], None]) -> Iterator[None]:
    """Tell `observer` each problem that is met meanwhile, at least once."""
    with _lock:
        _observers.append(observer)
        _routes.clear()  # what was met before must be seen again
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep a trial and its caller apart: autocast, inference mode, saved-tensor hooks (as checkpointing sets them) and
    the default device do not reach the trial, and the caller's random numbers go on as if there had been none.
    """

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is),
        torch.device("cpu"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        yield


def _new_route(
    signature: Any, q: Tensor, problem: Problem, layout: str, backend: str | None, order: str | None
) -> Route:
    if q.device.type == "meta":
        raise InvalidInput("q, k and v are on the meta device and hold no data; explain() takes them")
    if order is not None:
        orders.check(order)
    with _lock:
        for observer in _observers:
            observer(problem)
        decision = _forced(problem, backend) if backend is not None else _decide(problem)
        if backend is not None:
            _counts["forced"] += 1
        chosen = registry.load(decision.choice)
        cast = autocast_dtype(q.device.type)
        cast = cast if cast is not None and q.dtype != torch.float64 else None
        transposed = layout == "bhnd"
        route = Route(chosen.run, problem, chosen.name, not (transposed or cast or problem.masked), transposed, cast)
        if len(_routes) >= MOST_ROUTES:
            _routes.clear()
        _routes[signature] = route
    return route


def _run_prepared(
    route: Route,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor | None,
    key_mask: Tensor | None,
    return_lse: bool,
) -> Any:
    """Masks, the other layout, autocast."""
    masks = {}
    if seq_lens is not None:
        check_seq_lens_values(seq_lens, route.problem.q_len)
        masks["seq_lens"] = seq_lens
    if key_mask is not None:
        masks["key_mask"] = key_mask
    if route.transposed:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    try:
        if route.cast is None:
            result = route.run(q, k, v, route.problem, **masks)
        else:
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = q.to(route.cast), k.to(route.cast), v.to(route.cast)
                result = route.run(q, k, v, route.problem, **masks)
    except _THROUGH:
        raise
    except Exception as error:
        raise _failed(route, error) from error
    out, lse = _parts(route, result)
    out = out.transpose(1, 2) if route.transposed else out
    return _with_lse(route, (out, lse)) if return_lse else out


def _parts(route: Route, result: Any) -> tuple[Tensor, Tensor | None]:
    """out and lse of what a backend returned."""
    if isinstance(result, Tensor):
        return result, None
    if type(result) is tuple and len(result) == 2 and isinstance(result[0], Tensor):
        return result
    kind = type(result).__name__
    raise BackendFailed(f"{route.backend} returned a {kind}, neither out nor (out, lse), for {route.problem}")


def _with_lse(route: Route, result: Any) -> tuple[Tensor, Tensor]:
    if type(result) is tuple and len(result) == 2 and isinstance(result[1], Tensor):
        return result
    _parts(route, result)
    raise BackendFailed(f"{route.backend} was asked for lse and did not return it for {route.problem}")


def _failed(route: Route, error: Exception) -> BackendFailed:
    return BackendFailed(f"{route.backend} failed on {route.problem}: {type(error).__name__}: {error}")


def _decide(problem: Problem) -> Decision:
    decision = _decided.get(problem)
    if decision is not None:
        return decision
    setting = mode()
    decision = None if setting == "off" else stored(problem)
    if decision is not None:
        _counts["loaded" if decision.source == "measured" else "shipped"] += 1
    elif setting == "locked":
        raise NotDecided(
            f"ATTN_DISPATCH_MODE=locked and nothing is decided for {problem}; run 'attn-dispatch profile' "
            f"on it first, or another mode"
        )
    else:
        decision = _make(problem, setting)
    _decided[problem] = decision
    return decision


def _make(problem: Problem, setting: str) -> Decision:
    """Measure, where that is allowed, else the static choice."""
    found = candidates(problem)
    fallback = _heuristic(problem, found)
    if not fallback.choice:
        raise NoBackend(_no_backend(problem, fallback.candidates, forced=False))
    if setting == "tune":
        if _capturing(problem.device):
            logger.warning(
                "not measured inside CUDA-graph capture, %s by the static choice: %s", fallback.choice, problem
            )
            note_missed(cache_folder(), problem.to_dict())
        else:
            from attn_dispatch import tuner  # what measures is loaded when there is something to measure

            with undisturbed(problem.device):
                decision = tuner.decide(problem, budget_ms() / 1e3)
            if decision is not None:
                Store(cache_folder()).put(decision)
                _counts["measured"] += 1
                return decision
    _counts["heuristic"] += 1
    return fallback


def _forced(problem: Problem, name: str) -> Decision:
    if name not in registry.names():
        raise InvalidInput(f"backend must be None or one of {', '.join(registry.names())}, got {name!r}")
    backend = registry.load(name)
    try:
        refusals = backend.refusals(problem)
    except Exception as error:
        raise BackendFailed(f"{name} cannot tell whether it can run {problem}: {error!r}") from error
    if refusals:
        row = Row(backend=name, order=orders.NATURAL, status="unsupported", reason="; ".join(map(str, refusals)))
        raise NoBackend(_no_backend(problem, (row,), forced=True))
    row = Row(backend=name, order=orders.NATURAL, status="chosen", version=registry.version_of(backend))
    return _unmeasured(problem, name, "forced", (row,))


def _heuristic(problem: Problem, found: list[Candidate]) -> Decision:
    chosen = heuristic(found)
    rows = tuple(
        c.row or Row(backend=c.name, order=c.order, status="chosen" if c is chosen else "not_measured") for c in found
    )
    return _unmeasured(problem, "" if chosen is None else chosen.name, "heuristic", rows)


def _unmeasured(problem: Problem, choice: str, source: str, rows: tuple[Row, ...]) -> Decision:
    where = silicon(problem.device)
    return Decision(
        key=problem.key(where),
        silicon=where,
        title=str(problem),
        problem=problem.to_dict(),
        choice=choice,
        order=orders.NATURAL if choice else "",
        source=source,
        candidates=rows,
        versions=versions(),
        provenance=provenance(problem.device),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _can_run(problem: Problem, name: str) -> bool:
    """Refusals and free memory are of now, not of when the decision was made."""
    return any(c.name == name and c.row is None for c in candidates(problem))


def _no_backend(problem: Problem, rows: Iterable[Row], forced: bool) -> str:
    kv = f"[{problem.batch}, {problem.k_len}, {problem.kv_heads}, {problem.head_dim}]"
    lines = [
        f"no backend can run {problem.pattern} on {problem.device} in {str(problem.dtype).removeprefix('torch.')}:",
        f"  q [{problem.batch}, {problem.q_len}, {problem.heads}, {problem.head_dim}]  k, v {kv}",
        *(f"  {row.backend}: {row.reason}" for row in rows),
    ]
    return "\n".join(lines + ["Pass backend=None to let every backend be tried."] * forced)


def mode() -> str:
    """$ATTN_DISPATCH_MODE, checked."""
    mode = os.environ.get("ATTN_DISPATCH_MODE", "") or "tune"
    if mode not in MODES:
        raise InvalidInput(f"$ATTN_DISPATCH_MODE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def budget_ms() -> float:
    """$ATTN_DISPATCH_BUDGET_MS: milliseconds that measuring one unseen problem may take."""
    text = os.environ.get("ATTN_DISPATCH_BUDGET_MS", "")
    try:
        value = float(text) if text else DEFAULT_BUDGET_MS
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise InvalidInput(f"$ATTN_DISPATCH_BUDGET_MS must be a number >= 0, got {text!r}")
    return value


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _frozen(value: Any) -> Any:
    """Lists, arrays and iterators as tuples, which have a hash and can be read more than once."""
    if value is None or isinstance(value, tuple | str | int):
        return value
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        return tuple(plain)
    except TypeError:
        return plain


def _autocast() -> tuple[torch.dtype | None, ...]:
    return autocast_dtype("cpu"), autocast_dtype("cuda")


def _outside_graph(*args: Any, **kwargs: Any) -> Any:
    """A compiled function calls attend between its graphs: routing, files and timing are no part of a graph."""
    return torch.compiler.disable(attend)(*args, **kwargs)  # type: ignore[no-untyped-call]
