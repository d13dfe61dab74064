"""Routes: what was found out for a call, by which attend() runs the calls that are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.calls.tensor_match import Fits, fits
from attn_dispatch.calls.widths import plain_call
from attn_dispatch.decisions import decide, unmeasured
from attn_dispatch.decisions.call import ResolvedCall, made
from attn_dispatch.decisions.graphs.encoding import encoded
from attn_dispatch.decisions.trial_limits import cannot_measure
from attn_dispatch.errors import InvalidInput
from attn_dispatch.private import forward_ad, mode_count
from attn_dispatch.spec import tracing
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.problem import Call, Problem
from attn_dispatch.spec.tensors import LAYOUTS, autocast_dtype, check_seq_lens_values
from attn_dispatch.spec.torch_settings import matmul_precision
from attn_dispatch.text import titled

MAX_ROUTES = 4096  #: entries of the table of routes, 5 to 20 KB each; past this the oldest is made anew if needed
MAX_CHAIN = 16  #: routes of one signature, which are searched one by one


@dataclass(frozen=True, slots=True)
class Route(ResolvedCall):
    """The cached decision for one call signature; valid while fits(q, k, v) and, for float32, `precision` is the same.

    `direct`: `run` takes the arguments as they are. `next_route`: another route of the same signature, `depth`: how
    many follow. `graphed`: the call is traced into a graph, so that values of tensors cannot be checked.
    """

    fits: Fits
    precision: str | None
    next_route: Route | None
    depth: int
    direct: bool
    transposed: bool
    cast: torch.dtype | None
    graphed: bool

    def attended(self, call: Call) -> Any:
        """What `attend` returns for a call of this route."""
        if not self.direct:
            return self.prepared(*call.qkv, call.return_lse, **call.tensors)
        out, lse = self.result(*call.qkv)
        return (out, lse) if call.return_lse else out

    def prepared(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, /, **tensors: Tensor | None) -> Any:
        """What `attend` returns, with further tensors, layout "bhnd" or autocast."""
        seq_lens = tensors["seq_lens"]
        if seq_lens is not None and not self.graphed:
            check_seq_lens_values(seq_lens, self.problem.q_len)
        if self.transposed:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.cast is None:
            out, lse = self.result(q, k, v, **tensors)
        else:
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = q.to(self.cast), k.to(self.cast), v.to(self.cast)
                out, lse = self.result(q, k, v, **tensors)
        out = out.transpose(1, 2) if self.transposed else out
        return (out, lse) if return_lse else out


# In every stored key `mode_count` is 0 and `_current_level` negative: these routes are not used under dispatch modes,
# nor where there may be tangents.
routes: dict[Any, Route] = {}
process_state.register(process_state.ROUTES, routes.clear)
process_state.register(process_state.ON_DEVICE, routes.clear)


def route_of_data(call: Call, pattern: DataPattern, key: Any) -> tuple[Call, Any, Route | None]:
    """The call as `plain_call` has it; its key with the facts of the tensors in place of these; and its route, if there
    is one.

    Its calls are checked as the first one was; what depends on shapes and devices alone is in the key.
    """
    if call.q.ndim != 4 or call.k.ndim != 4 or call.layout not in LAYOUTS:
        return call, None, None  # which raises
    n, h = call.layout.index("n"), call.layout.index("h")
    k_len = call.k.shape[n]
    form = pattern.form(k_len, call.q.shape[h], call.k.shape[h])
    call = plain_call(call)
    plain = None if call.pattern is pattern else call.pattern
    key = *key[:2], (form, pattern.data.shape, pattern.device, plain), *key[3:]
    try:
        route = routes.get(key)
    except TypeError:  # another argument is a list
        return call, None, None
    while route is not None and not (
        route.fits(*call.qkv) and (route.precision is None or route.precision == matmul_precision())
    ):
        route = route.next_route
    if route is not None:
        pattern.check(call.q.shape[n], k_len)
    return call, key, route


def new_route(call: Call, key: Any, node: Callable[..., Any] | None = None) -> Route:
    """Decide for a call that no rewriter changes; its route is kept by `key` where no tracing or graph is at work.

    Args:
        node: makes of `Encoded`'s settings and a decided call what runs it as a node of autograd.
    """
    problem, tensors, q = Problem.of_call(call), call.qkv, call.q
    if q.device.type == "meta":
        raise InvalidInput("q, k and v are on the meta device and hold no data; explain() takes them")
    forgotten = process_state.forgotten
    graphed = tracing.graphed(*tensors)
    traced = graphed or tracing.is_traced()
    cast = None if q.dtype == torch.float64 else autocast_dtype(q.device.type)
    like = None if cast or traced or node is not None else call
    decision, run, heads_first = made(problem, call.backend, call.order, traced, like)
    backend = titled(*decision.chosen)
    if node is not None:
        given = encoded(call, problem.bias_needs_grad, None, None)
        run, backend = node(given.settings, ResolvedCall(run, problem, backend)), ""
    if graphed and (call.backend is not None or call.order is not None):
        unmeasured.check_traceable(problem, decision)
    transposed = call.layout == "bhnd"
    with decide.lock:
        next_route = None if key is None else routes.get(key)
        if next_route is not None and next_route.depth >= MAX_CHAIN - 1:
            next_route = None
        route = Route(
            fits=fits(*tensors),
            precision=matmul_precision() if q.dtype == torch.float32 else None,
            next_route=next_route,
            depth=0 if next_route is None else next_route.depth + 1,
            run=run,
            problem=problem,
            backend=backend,
            direct=transposed == heads_first and not (cast or any(x is not None for x in call.tensors.values())),
            transposed=transposed,
            cast=cast,
            graphed=graphed,
        )
        # Another thread may have replaced the decision meanwhile, or begun to observe.
        is_current = forgotten == process_state.forgotten
        odd = traced or mode_count() or forward_ad._current_level >= 0 or cannot_measure(problem.device)
        if is_current and key is not None and not odd:
            routes[key] = route
            decide.drop_oldest(routes, MAX_ROUTES)
    return route
