"""What tests of graphs share: patterns, the operator, and functions without their types, for other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attn_dispatch import attend
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from tests.support.calls import formula

OP = torch.ops.attn_dispatch.attend.default  #: of attend(), defined by the import above
PATTERNS = (
    Dense(),
    Dense(is_causal=True),
    Window(4, 2),
    Window(3, 0, sinks=2),
    Dilated((4, 16), (1, 2)),
    Dilated((4, 8), (1, 2), is_causal=True, offsets="block"),
    Neighborhood((4, 4), (3, 3)),
    Neighborhood((16,), (3,), (2,), edges="shift"),
    Neighborhood((4, 4), (2, 3), (1,), (False, True), "shift", (2, 1)),
    Reordered(Neighborhood((4, 4), (3, 3)), "hilbert"),
)

Function = Callable[..., Any]
compile_: Function = torch.compile
exact: Function = formula
attended: Function = attend
differentiated: Function = torch.autograd.grad


def aot(function: Function, **options: Any) -> Function:
    """Compiled without gaps, with AOTAutograd's graphs of both passes, without a C++ compiler."""
    compiled: Function = compile_(function, fullgraph=True, backend="aot_eager", **options)
    return compiled


class Called(nn.Module):
    """A function of tensors as a module, which torch.export takes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)
