"""The floating-point operations of the operators, for torch.utils.flop_counter."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_dispatch.decisions.graphs.encoding import Encoded, decoded_pattern
from attn_dispatch.spec.shapes import pair_count


def count_flops() -> None:
    """Let FlopCounterMode count the operators, where a program has loaded it: to import it takes long."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    ops = torch.ops.attn_dispatch
    for packet, formula in {ops.attend: _forward_flops, ops.attend_backward: _backward_flops}.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)
        for mode in _get_current_dispatch_mode_stack():  # those that were entered before
            formulas = getattr(getattr(mode, "counter", mode), "flop_registry", None)
            if formulas is not None:
                formulas.setdefault(packet, counter.flop_registry[packet])


def _pairs(q: Any, k: Any, rest: tuple[Any, ...]) -> int:
    given = Encoded.first_of(rest)
    pattern = decoded_pattern(given.pattern, tuple(map(int, given.numbers)))
    return int(q[0]) * pair_count(pattern, int(q[1]), int(k[1]), int(q[2]))


def _forward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products for each pair that the pattern has, whatever masks and documents hide."""
    return 2 * (int(q[3]) + int(v[3])) * _pairs(q, k, rest)


def _backward_flops(
    grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    """Five products: the scores again, the weights' gradients, and dq, dk and dv."""
    return 2 * (3 * int(q[3]) + 2 * int(v[3])) * _pairs(q, k, rest)
