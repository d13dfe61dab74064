"""Calls traced into a graph or intercepted by a dispatch mode: right for other inputs, and nothing is decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_dispatch import attend, counters
from attn_dispatch.calls import routes
from attn_dispatch.decisions import decide
from attn_dispatch.errors import InvalidInput, NoBackend, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.hidden import _unseen
from attn_dispatch.spec.orders import Reordered, _permutation, same_permutation
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from tests.support.calls import close, counted, formula, qkv
from tests.support.graphs import OP, Called, Function, attended, exact
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("little_time")

PATTERNS = (Dense(), Dense(is_causal=True), Window(4, 2), Dilated((4, 16), (1, 2)), Neighborhood((4, 4), (3, 3)))


def exported(function: Function, *tensors: Tensor) -> Function:
    return torch.export.export(Called(function), tensors, strict=False).module()


TRACERS: dict[str, Callable[..., Function]] = {
    "real": lambda function, *tensors: make_fx(function)(*tensors),
    "fake": lambda function, *tensors: make_fx(function, tracing_mode="fake")(*tensors),
    "early": lambda function, *tensors: make_fx(function, pre_dispatch=True)(*tensors),
    "exported": exported,
}


selective: Function = create_selective_checkpoint_contexts


def others() -> tuple[Tensor, ...]:
    return tuple(x.flip(1) * 0.7 for x in qkv())


def settle(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Route plain calls by a decision for `native`."""
    with monkeypatch.context() as patch:
        patch.setattr(decide, "decision_for", lambda problem: decide.forced_decision(problem, "native", None))
        attend(*qkv(), pattern)
        attend(*qkv(), pattern, return_lse=True)
    assert {route.backend.split()[0] for route in routes.routes.values()} == {"native"}


@crossed(
    lambda pattern, tracer, decided: {"tracer": tracer, "decided": decided},
    pattern=PATTERNS,
    tracer=tuple(TRACERS),
    decided=(False, True),
)
def test_a_graph_holds_for_other_inputs(
    pattern: Pattern, tracer: str, decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decided:
        settle(pattern, monkeypatch)
    for return_lse in (False, True):
        graph: Any = TRACERS[tracer](lambda q, k, v: attend(q, k, v, pattern, return_lse=return_lse), *qkv())  # noqa: B023
        assert [node.target for node in graph.graph.nodes if "attend" in str(node.target)] == [OP]
        found, expected = graph(*others()), exact(*others(), pattern)
        assert all(map(close, found if return_lse else [found], expected))


#: Patterns whose backends cache masks or permutations, and the number of keys: the first three hide some.
CACHED = {
    "longer-keys": (Window(2, 0), 24),
    "uncovered": (Dilated((4, 8), (2, 4)), 16),
    "uncovered-reordered": (Reordered(Dilated((8,), (2,)), "residue"), 16),
    "reordered": (Reordered(Neighborhood((4, 4), (3, 3)), "hilbert"), 16),
}


def uncached(name: str) -> tuple[Pattern, Tensor, Tensor, Tensor, Tensor]:
    """Of these, with nothing cached: the pattern, q, k, v and out."""
    pattern, k_len = CACHED[name]
    for cached in (_unseen, _permutation, same_permutation):
        cached.cache_clear()
    q, k, v = (torch.randn(1, length, 4, 8) for length in (16, k_len, k_len))
    return pattern, q, k, v, formula(q, k, v, pattern)[0].nan_to_num()  # 0/0 for a query that sees no key


@crossed(lambda name, tracer: {"tracer": tracer}, name=tuple(CACHED), tracer=tuple(TRACERS))
def test_a_trace_leaves_nothing_to_other_calls(name: str, tracer: str, set_mode: Callable[[str], None]) -> None:
    """Neither wrong values nor tensors of the trace: caches are filled as by a plain call."""
    set_mode("off")
    pattern, q, k, v, expected = uncached(name)
    graph = TRACERS[tracer](lambda q, k, v: attend(q, k, v, pattern), *(torch.zeros_like(x) for x in (q, k, v)))
    assert close(graph(q, k, v), expected)
    able = ("manual", "sdpa_mask", "tiles", "native")
    for backend in (each for each in able if not registry.load(each).refusals(Problem.of(q, k, v, pattern))):
        found = attend(q, k, v, pattern, backend=backend)
        assert type(found) is Tensor
        assert close(found, expected), backend


@pytest.mark.parametrize("name", CACHED)
def test_the_default_device_is_not_that_of_cached_masks(name: str, set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    pattern, q, k, v, expected = uncached(name)
    with torch.device("meta"):
        found = attend(q, k, v, pattern, backend="manual")
    assert close(found, expected)
    assert close(attend(q, k, v, pattern, backend="manual"), expected)


@thinned("tracer", TRACERS, 2)
def test_a_graph_holds_for_other_masks(tracer: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, key_mask: Tensor) -> Tensor:
        found: Tensor = attend(q, k, v, Window(4, 2), seq_lens=lens, key_mask=key_mask)
        return found

    mask = torch.arange(16)[None] % 5 > 0
    graph = TRACERS[tracer](function, *qkv(), torch.tensor([16]), mask)
    arguments = (*others(), torch.tensor([9]), ~mask | (torch.arange(16) > 3))
    assert torch.allclose(graph(*arguments), function(*arguments), atol=1e-6)  # pyright: ignore[reportCallIssue]


@crossed(tracer=tuple(TRACERS), backend=("native", "tiles", "sdpa_mask", "manual", "sdpa"))
def test_a_forced_backend(tracer: str, backend: str) -> None:
    """It runs in the operator; one that consists of PyTorch's operators is traced through."""
    graph: Any = TRACERS[tracer](lambda q, k, v: attend(q, k, v, Dense(), backend=backend), *qkv())
    inlined = backend in ("manual", "sdpa")
    assert [node.target for node in graph.graph.nodes if "attend" in str(node.target)] == [OP] * (not inlined)
    assert close(graph(*others()), exact(*others(), Dense())[0])


@crossed(pattern=PATTERNS, backend=(None, "manual", "sdpa", "sdpa_mask", "tiles", "native"))
def test_a_wrapper_subclass_keeps_its_parts(pattern: Pattern, backend: str | None) -> None:
    """Both tensors inside have their own results, or the call raises."""
    make: Any = TwoTensor
    q, k, v = (make(first, second).requires_grad_() for first, second in zip(qkv(), others()))
    if backend in ("sdpa_mask", "tiles", "native") or (backend == "sdpa" and not isinstance(pattern, Dense)):
        with pytest.raises(NoBackend):
            attend(q, k, v, pattern, backend=backend)
        return
    out = attend(q, k, v, pattern, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for part, plain in (("a", qkv()), ("b", others())):
        x = [each.requires_grad_() for each in plain]
        expected = exact(*x, pattern)[0]
        right = [expected, *torch.autograd.grad(expected.sum(), x)]
        assert all(close(getattr(one, part), other.double()) for one, other in zip([out, *grads], right))


def test_dropout_cannot_be_traced() -> None:
    with pytest.raises(NoBackend, match="would not be valid for other inputs"):
        make_fx(lambda q, k, v: attend(q, k, v, dropout_p=0.5))(*qkv())


def test_symbolic_sizes() -> None:
    graph = make_fx(lambda q, k, v: attend(q, k, v, Window(4, 2)), tracing_mode="symbolic")(*qkv())
    assert close(graph(*qkv(24)), exact(*qkv(24), Window(4, 2))[0])
    with pytest.raises(InvalidInput, match="q must have sizes that are numbers"):
        make_fx(lambda q, k, v: attend(q, k, v, backend="manual"), tracing_mode="symbolic")(*qkv())


def test_locked_mode_applies_to_graphs(set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    with pytest.raises(NotDecided):
        make_fx(lambda q, k, v: attend(q, k, v))(*qkv())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_fake_tensors_leave_no_state(pattern: Pattern) -> None:
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in qkv()]
        assert attended(*fake, pattern).shape == fake[0].shape
    assert attended(*fake, pattern).shape == fake[0].shape
    assert (counters()["measured"], len(routes.routes)) == (0, 0)
    assert close(attend(*qkv(), pattern), formula(*qkv(), pattern)[0])
    assert counters()["measured"] == 1


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_dispatch_mode_sees_one_operator(pattern: Pattern) -> None:
    """Which is decided as a plain call is."""
    tensors = qkv()
    with Noting() as mode:
        found = attend(*tensors, pattern), attend(*tensors, pattern, backend="native")
    assert mode.seen == [OP, OP]
    assert all(close(each, formula(*qkv(), pattern)[0]) for each in found)
    assert counters()["measured"] == 1


def test_selective_checkpoints_are_measured_like_plain_calls() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def contexts() -> Any:
        return selective(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

    out = checkpoint(attend, q, k, v, Window(4, 2), use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(formula(q, k, v, Window(4, 2))[0].square().sum(), (q, k, v))
    assert all(close(one, other.double()) for one, other in zip(found, wanted))
    assert counted(measured=1)
