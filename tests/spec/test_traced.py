"""Which calls count as traced: what no test of a traced call (tests/call) can show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_dispatch import private
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing

X = torch.ones(3)


def test_fake_tensors_that_are_no_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 makes them, in C++: known by one function."""
    assert not tracing.graphed(X)
    monkeypatch.setattr(private, "is_fake", lambda x: x is X)
    assert tracing.graphed(X)
    assert tracing.is_traced(X)
    assert tracing.as_operator(X)


def test_sizes_are_numbers() -> None:
    tracing.check_sizes(q=X, k=None)

    def symbolic(x: Tensor) -> Tensor:
        with pytest.raises(InvalidInput, match=r"k must have sizes that are numbers, got .*: trace attend with static"):
            tracing.check_sizes(q=X, k=x)
        return x

    make_fx(symbolic, tracing_mode="symbolic")(X)
