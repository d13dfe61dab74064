"""Calls traced into a graph or intercepted by a dispatch mode: right for other inputs, and nothing is decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend, counters, dispatch
from attn_dispatch.decisions import decide
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.hidden import _unseen
from attn_dispatch.spec.orders import _permutation, same_permutation
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reordered import Reordered
from tests.support.calls import close, counted, formula, qkv
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("little_time")

PATTERNS = (Dense(), Dense(is_causal=True), Window(4, 2), Dilated((4, 16), (1, 2)), Neighborhood((4, 4), (3, 3)))

Function = Callable[..., Any]


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def exported(function: Function, *tensors: Tensor) -> Function:
    return torch.export.export(Module(function), tensors, strict=False).module()


TRACERS: dict[str, Callable[..., Function]] = {
    "real": lambda function, *tensors: make_fx(function)(*tensors),
    "fake": lambda function, *tensors: make_fx(function, tracing_mode="fake")(*tensors),
    "early": lambda function, *tensors: make_fx(function, pre_dispatch=True)(*tensors),
    "exported": exported,
}


exact: Function = formula
attended: Function = attend
selective: Function = create_selective_checkpoint_contexts


def others() -> tuple[Tensor, ...]:
    return tuple(x.flip(1) * 0.7 for x in qkv())


@pytest.fixture(params=["unseen", "decided"])
def decided(request: pytest.FixtureRequest) -> bool:
    """Whether plain calls already have a decision, for `native`."""
    found: bool = request.param == "decided"
    return found


def settle(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Route plain calls by a decision for `native`."""
    with monkeypatch.context() as patch:
        patch.setattr(decide, "decision_for", lambda problem: decide.forced_decision(problem, "native", None))
        attend(*qkv(), pattern)
        attend(*qkv(), pattern, return_lse=True)
    assert {route.backend.split()[0] for route in dispatch._routes.values()} == {"native"}


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
    before = dict(decide._decided)
    for return_lse in (False, True):
        graph = TRACERS[tracer](lambda q, k, v: attend(q, k, v, pattern, return_lse=return_lse), *qkv())  # noqa: B023
        found, expected = graph(*others()), exact(*others(), pattern)
        assert all(map(close, found if return_lse else [found], expected))
    assert counters()["measured"] == 0
    assert decide._decided == before
    assert len(dispatch._routes) == 2 * decided


#: Patterns whose backends cache masks or permutations, and the number of keys: the first three hide some.
CACHED = {
    "longer-keys": (Window(2, 0), 24),
    "uncovered": (Dilated((4, 8), (2, 4)), 16),
    "uncovered-reordered": (Reordered(Dilated((8,), (2,)), "residue"), 16),
    "reordered": (Reordered(Neighborhood((4, 4), (3, 3)), "hilbert"), 16),
}


@crossed(lambda name, tracer: {"tracer": tracer}, name=tuple(CACHED), tracer=tuple(TRACERS))
def test_a_trace_leaves_nothing_to_other_calls(name: str, tracer: str, set_mode: Callable[[str], None]) -> None:
    """Neither wrong values nor tensors of the trace: caches are filled as by a plain call."""
    set_mode("off")
    pattern, k_len = CACHED[name]
    for cached in (_unseen, _permutation, same_permutation):
        cached.cache_clear()
    q, k, v = (torch.randn(1, length, 4, 8) for length in (16, k_len, k_len))
    expected = formula(q, k, v, pattern)[0].nan_to_num()  # 0/0 for a query that sees no key
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
    pattern, k_len = CACHED[name]
    for cached in (_unseen, _permutation, same_permutation):
        cached.cache_clear()
    q, k, v = (torch.randn(1, length, 4, 8) for length in (16, k_len, k_len))
    expected = formula(q, k, v, pattern)[0].nan_to_num()
    with torch.device("meta"):
        found = attend(q, k, v, pattern, backend="manual")
    assert close(found, expected)
    assert close(attend(q, k, v, pattern, backend="manual"), expected)


@crossed(lambda pattern, tracer: {"tracer": tracer}, pattern=PATTERNS, tracer=tuple(TRACERS))
def test_gradients_pass_through_a_graph(pattern: Pattern, tracer: str) -> None:
    """Also through lse; traced with and without gradients."""
    for wanted in (False, True):
        inputs = [x.requires_grad_(wanted) for x in qkv()]
        for return_lse in (False, True):
            graph = TRACERS[tracer](lambda q, k, v: attend(q, k, v, pattern, return_lse=return_lse), *inputs)  # noqa: B023
            x = [each.detach().requires_grad_() for each in others()]
            found, expected = graph(*x), exact(*x, pattern)
            results = zip(found, expected) if return_lse else [(found, expected[0])]
            totals = [sum(each.double().square().sum() for each in side) for side in zip(*results)]
            pairs = zip(*(torch.autograd.grad(total, x) for total in totals))  # pyright: ignore[reportCallIssue, reportArgumentType]
            assert all(close(one, other.double()) for one, other in pairs)


@thinned("tracer", TRACERS, 2)
def test_a_graph_holds_for_other_masks(tracer: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, key_mask: Tensor) -> Tensor:
        found: Tensor = attend(q, k, v, Window(4, 2), seq_lens=lens, key_mask=key_mask)
        return found

    mask = torch.arange(16)[None] % 5 > 0
    graph = TRACERS[tracer](function, *qkv(), torch.tensor([16]), mask)
    arguments = (*others(), torch.tensor([9]), ~mask | (torch.arange(16) > 3))
    assert torch.allclose(graph(*arguments), function(*arguments), atol=1e-6)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_forced_backend_that_cannot_be_traced(tracer: str) -> None:
    for backend in ("native", "tiles", "sdpa_mask"):
        attend(*qkv(), backend=backend)
        with pytest.raises(NoBackend, match=f"{backend} cannot be traced"):
            TRACERS[tracer](lambda q, k, v: attend(q, k, v, backend=backend), *qkv())  # noqa: B023


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
    with pytest.raises(InvalidInput, match="q must have sizes that are numbers"):
        make_fx(lambda q, k, v: attend(q, k, v), tracing_mode="symbolic")(*qkv())


def test_locked_mode_applies_to_graphs(set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    with pytest.raises(NotDecided):
        make_fx(lambda q, k, v: attend(q, k, v))(*qkv())


def test_fake_tensors_leave_no_state() -> None:
    for pattern in PATTERNS:
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in qkv()]
            assert attended(*fake, pattern).shape == fake[0].shape
        if not isinstance(pattern, Dense):  # sdpa has no tensors of its own
            with pytest.raises(BackendFailed, match="FakeTensor"):
                attended(*fake, pattern)
        assert len(dispatch._routes) == 0
    assert counters()["measured"] == 0
    for pattern in PATTERNS[2:]:
        assert close(attend(*qkv(), pattern), formula(*qkv(), pattern)[0])
    assert counters()["measured"] == len(PATTERNS[2:])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_dispatch_mode_that_counts(pattern: Pattern, decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode sees PyTorch's operators; a forced backend runs."""
    if decided:
        settle(pattern, monkeypatch)
    with FlopCounterMode(display=False) as counter:
        assert close(attend(*qkv(), pattern), formula(*qkv(), pattern)[0])
        assert close(attend(*qkv(), pattern, backend="native"), formula(*qkv(), pattern)[0])
    assert counter.get_total_flops() > 0
    assert counters()["measured"] == 0


def test_selective_checkpoints_are_measured_like_plain_calls() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def contexts() -> Any:
        return selective(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

    out = checkpoint(attend, q, k, v, Window(4, 2), use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(formula(q, k, v, Window(4, 2))[0].square().sum(), (q, k, v))
    assert all(close(one, other.double()) for one, other in zip(found, wanted))
    assert counted(measured=1)
