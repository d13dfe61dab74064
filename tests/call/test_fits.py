"""A call uses a stored route only if it equals an earlier call in everything that a decision depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, private, register
from attn_dispatch.calls import routes, tensor_match
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Window
from attn_dispatch.spec.problem import Problem
from tests.support.calls import precision, qkv, setting, threads
from tests.support.planted import Planted


class Other(Tensor):
    """A subclass that changes nothing."""


@pytest.fixture
def seen() -> Planted:
    backend = Planted(lambda q, *given, **more: (q, q[..., 0].transpose(1, 2)), "seen")
    register(backend)
    return backend


@pytest.fixture(params=["guards", "attributes"])
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are compared: by the guards of PyTorch's compiler, or by attributes where those are missing."""
    if request.param == "attributes":
        monkeypatch.setattr(tensor_match, "_guards_work", lambda: False)
    return str(request.param)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "high": lambda: precision("high"),
    "medium": lambda: precision("medium"),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-float16": lambda: torch.autocast("cpu", torch.float16),
    "no-grad": torch.no_grad,
    "inference": torch.inference_mode,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pattern": {"pattern": Window(4, 2)},
    "branches": {"segment_lengths": (4, 8), "dilation_rates": (1, 2)},
    "other-branches": {"segment_lengths": (4, 8), "dilation_rates": (1, 4)},
    "other-lengths": {"segment_lengths": (4, 16), "dilation_rates": (1, 2)},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.5},
    "scale": {"scale": 0.5},
    "lse": {"return_lse": True},
    "order": {"order": "natural"},
    "seq_lens": {"seq_lens": torch.tensor([9])},
    "seq_lens-int32": {"seq_lens": torch.tensor([9], dtype=torch.int32)},
    "key_mask": {"key_mask": torch.ones(1, 16, dtype=torch.bool)},
    "layout": {"layout": "bhnd"},
}


def run(tensors: Sequence[Any], **arguments: Any) -> Any:
    q, k, v = tensors
    return attend(q, k, v, backend="seen", **arguments)


def problem_of(tensors: Sequence[Any], **arguments: Any) -> Problem:
    q, k, v = tensors
    return Problem.of(q, k, v, **arguments)


def padded(x: Tensor) -> Tensor:
    """The same values with other strides."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def requiring_grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": padded,
    "gradient": requiring_grad,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(Other),
}


@pytest.mark.usefixtures("comparison")
def test_every_setting_has_its_route(seen: Planted) -> None:
    """Calls with each setting, mixed with the others and repeated: each needs its own route, then reuses it."""
    q, k, v = (requiring_grad(x) for x in qkv())
    expected: dict[str, Problem] = {}
    for _ in range(2):
        for name, change in {"plain": nullcontext, **SETTINGS}.items():
            with change():
                kept = len(seen.seen)
                attend(q, k, v, backend="seen")
                assert len(seen.seen) == kept + 1
                assert seen.seen[-1] == Problem.of(q, k, v), name
                assert expected.setdefault(name, seen.seen[-1]) is seen.seen[-1], f"{name} was no hit"
    assert len(set(expected.values())) == len(expected) - 2, "threads and inference mode make no other problem"
    assert expected["threads"] is not expected["plain"]


@pytest.mark.usefixtures("comparison")
def test_every_argument_has_its_route(seen: Planted) -> None:
    tensors = qkv()
    expected: dict[str, Problem] = {}
    for _ in range(2):
        for name, arguments in {"plain": {}, **ARGUMENTS}.items():
            run(tensors, **arguments)
            problem = problem_of(tensors, **{n: value for n, value in arguments.items() if n != "order"})
            assert seen.seen[-1] == problem, name
            assert expected.setdefault(name, seen.seen[-1]) is seen.seen[-1], f"{name} was no hit"


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_tensor_is_compared(change: Callable[[Tensor], Tensor], seen: Planted) -> None:
    tensors = list(qkv())
    for place in (None, 0, 1, 2, None):
        changed = [change(x) if place == i else x for i, x in enumerate(tensors)]
        for _ in range(2):
            run(changed)
            assert seen.seen[-1] == problem_of(changed)
        assert seen.seen[-1] is seen.seen[-2]


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_invalid_tensors_are_refused_after_a_hit(place: int, seen: Planted) -> None:
    """A call where only one tensor has another shape, dtype or device is invalid, also after a valid one."""
    tensors = list(qkv())
    run(tensors)
    x = tensors[place]
    bad: list[Any] = [x[:, :8, :, :4], x.half(), x.to("meta"), x[0], x.tolist(), None, x.reshape(2, 8, 2, 8)]
    bad += [x.to_sparse(), x.numpy()]
    for one in bad:
        with pytest.raises(InvalidInput):
            run([one if i == place else y for i, y in enumerate(tensors)])
    run(tensors)
    assert len(seen.seen) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_lens": torch.tensor([9.0])},
        {"seq_lens": torch.tensor([9, 9])},
        {"seq_lens": torch.tensor([9], device="meta")},
        {"key_mask": torch.ones(1, 16)},
        {"key_mask": torch.ones(1, 8, dtype=torch.bool)},
        {"scale": torch.tensor(0.5)},
        {"order": "random"},
        {"layout": "nbhd"},
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_after_a_hit(wrong: dict[str, Any], seen: Planted) -> None:
    q, k, v = qkv()
    several: list[dict[str, Any]] = [ARGUMENTS["seq_lens"], ARGUMENTS["key_mask"], {"scale": 0.5}, {}]
    for good in several:
        attend(q, k, v, backend="seen", **good)
    with pytest.raises(InvalidInput):
        attend(q, k, v, backend="seen", **wrong)


@pytest.mark.usefixtures("comparison")
def test_shapes_of_the_same_size(seen: Planted) -> None:
    """Equally many elements in another shape."""
    shapes = [(1, 16, 2, 8), (2, 8, 2, 8), (1, 8, 4, 8), (1, 16, 4, 4), (1, 32, 1, 8)]
    for _ in range(2):
        for shape in shapes:
            x, y, z = (torch.randn(shape) for _ in range(3))
            attend(x, y, z, backend="seen")
            assert seen.seen[-1] == Problem.of(x, y, z)
    q = torch.randn(1, 16, 4, 8)
    for _ in range(2):
        for length, heads in ((16, 2), (8, 4), (32, 1)):
            k, v = (torch.randn(1, length, heads, 8) for _ in range(2))
            attend(q, k, v, backend="seen")
            assert (seen.seen[-1].k_len, seen.seen[-1].kv_heads) == (length, heads)


@pytest.mark.usefixtures("comparison")
def test_a_tensor_changed_in_place(seen: Planted) -> None:
    tensors = qkv()
    run(tensors)
    for x in tensors:
        x.requires_grad_()
        run(tensors)
        assert seen.seen[-1].needs_grad
        x.requires_grad_(False)
        run(tensors)
        assert not seen.seen[-1].needs_grad
    for x in tensors:
        x.resize_(1, 8, 2, 8)
    run(tensors)
    assert seen.seen[-1].q_len == 8
    tensors[0].as_strided_((1, 8, 2, 8), (128, 8, 64, 1))
    run(tensors)
    assert seen.seen[-1] == problem_of(tensors)


@pytest.mark.usefixtures("comparison")
def test_one_tensor_as_two_arguments(seen: Planted) -> None:
    x, y, z = qkv()
    chained = []
    for _ in range(2):
        for tensors in ((x, x, x), (x, y, y), (x, y, x), (x, x, y), (x, y, z)):
            run(tensors)
        chained.append(chain())
    assert chained[0] == chained[1], "each was a hit"
    assert len(seen.seen) == 10


def chain() -> int:
    """The number of routes, with those chained to others."""
    total = 0
    for route in routes.routes.values():
        each: routes.Route | None = route
        while each is not None:
            total, each = total + 1, each.next_route
    return total


@pytest.mark.usefixtures("comparison")
def test_the_routes_of_a_signature_are_bounded(seen: Planted) -> None:
    """Slices of ever wider rows have ever new strides."""
    for _ in range(2):
        for width in range(8, 8 + 2 * routes.MAX_CHAIN):
            q, k, v = (torch.randn(1, 4, 2, width)[..., :8] for _ in range(3))
            attend(q, k, v, backend="seen")
            assert seen.seen[-1] == Problem.of(q, k, v)
            assert chain() <= routes.MAX_CHAIN


@pytest.mark.usefixtures("comparison")
def test_inside_a_transform(seen: Planted) -> None:
    """Inside vmap a tensor looks like an ordinary one with an axis less."""
    q, k, v = (x.expand(3, *x.shape) for x in qkv())
    for _ in range(2):
        attend(q[0], k[0], v[0], backend="seen")
        out = torch.vmap(lambda q, k, v: attend(q, k, v, backend="seen"))(q, k, v)
        assert out.shape == q.shape
        grad = torch.func.grad(lambda q: attend(q, k[0], v[0], backend="seen").sum())(q[0])
        assert torch.equal(grad, torch.ones_like(q[0]))
        assert seen.seen[-1].needs_grad


@pytest.mark.usefixtures("comparison")
def test_settings_are_read_per_thread(seen: Planted) -> None:
    """Autocast and grad mode are thread-local."""
    tensors = [requiring_grad(x) for x in qkv()]
    found: dict[str, bool] = {}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            run(tensors)
            assert (seen.seen[-1].dtype, seen.seen[-1].needs_grad) == (torch.bfloat16, False)
            other = threading.Thread(target=lambda: found.update(out=run(tensors).requires_grad))
            other.start()
            other.join()
        assert (seen.seen[-1].dtype, seen.seen[-1].needs_grad) == (torch.float32, True)
        assert found.pop("out")


# --- missing or different guards --------------------------------------------------------------------------------------


def always(answer: bool) -> Callable[..., Any]:
    return lambda *tensors, **more: SimpleNamespace(check=lambda *tensors: answer)


@pytest.mark.parametrize(
    "guards", [private.lost("guards"), always(True), always(False)], ids=["missing", "says-yes", "says-no"]
)
def test_guards_are_tested_before_use(guards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_match._guards_work.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(private, "tensor_guards", guards)
        assert not tensor_match._guards_work()
        like = tensor_match.fits(*qkv())
    tensor_match._guards_work.cache_clear()
    assert like(*qkv())
    assert not like(*qkv(8))


def test_there_are_guards_here() -> None:
    """Without guards every hit takes twice as long: fail if a new PyTorch lacks them."""
    assert tensor_match._guards_work()
