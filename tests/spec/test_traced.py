"""What counts as traced, transformed or intercepted, and which of these calls are one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing

X = torch.ones(3)
Found = tuple[bool, bool, bool]  #: graphed, traced, one operator


def asked(x: Tensor) -> Found:
    return tracing.graphed(x), tracing.is_traced(x), tracing.as_operator(x)


class Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("no operator is called")


def noted(transform: Callable[[Callable[[Tensor], Tensor]], object]) -> Found:
    """What is found inside a function that a transform calls."""
    found: list[Found] = []

    def function(x: Tensor) -> Tensor:
        found.append(asked(x))
        return x.sum()

    transform(function)
    return found[0]


def in_mode(mode: Any) -> Found:
    with mode:
        return asked(X)


def with_fake() -> Found:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    return asked(fake)


def with_fake_of_cpp() -> Found:
    """As torch 2.14 has them: no subclass, and known by one function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_is_fake", lambda x: x is X)
        return asked(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own, of jvp
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: asked(X), (False, False, False)),
        (lambda: noted(lambda f: make_fx(f)(X)), (True, True, True)),
        (lambda: noted(lambda f: make_fx(f, pre_dispatch=True)(X)), (True, True, True)),
        (with_fake, (True, True, True)),
        (with_fake_of_cpp, (True, True, True)),
        (lambda: noted(lambda f: torch.func.grad(f)(X)), (False, True, True)),
        (lambda: noted(lambda f: torch.func.vmap(f)(X[None])), (False, True, True)),
        (lambda: noted(lambda f: torch.func.jvp(f, (X,), (X,))), (False, True, False)),
        (lambda: in_mode(FlopCounterMode(display=False)), (False, True, True)),
        (lambda: asked(X.as_subclass(Wrapper)), (True, True, False)),
    ],
    ids=["plain", "make_fx", "pre_dispatch", "fake", "fake_of_cpp", "grad", "vmap", "jvp", "mode", "subclass"],
)
def test_what_is_found(found: Callable[[], Found], expected: Found) -> None:
    assert found() == expected


def test_selective_checkpointing_is_no_interception() -> None:
    forward, _ = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)  # type: ignore[no-untyped-call]
    assert in_mode(forward) == (False, False, False)


def test_no_call_inside_an_operator_is_one() -> None:
    with FlopCounterMode(display=False):
        with tracing.inside_operator():
            with tracing.inside_operator():
                pass
            assert not tracing.as_operator(X)
        assert tracing.as_operator(X)


def test_sizes_are_numbers() -> None:
    tracing.check_sizes(q=X, k=None)

    def symbolic(x: Tensor) -> Tensor:
        with pytest.raises(InvalidInput, match=r"k must have sizes that are numbers, got .*: trace attend with static"):
            tracing.check_sizes(q=X, k=x)
        return x

    make_fx(symbolic, tracing_mode="symbolic")(X)


def test_a_plain_tensor_is_no_dtensor() -> None:
    assert not tracing.is_dtensor(X)
    assert tracing.context_parallel() is None
