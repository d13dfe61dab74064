"""The expected results of a call, for tests of any implementation of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Expected, expected_of

TENSORS = ("seq_lens", "key_mask", "bias", "alibi_slopes")


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    grad: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **arguments: Any,
) -> dict[str, Expected]:
    """out, lse and gradients of a call in float64, each with the largest absolute error of a correct result.

    The whole formula on all pairs of queries and keys: for small tensors.

    Args:
        q: [batch, q_len, heads, head_dim]. k, v: [batch, k_len, kv_heads, head_dim]. In float16, bfloat16 or float32,
            tolerances are what rounding in that dtype may cause.
        pattern: as `attend` takes it.
        grad: the gradient of out, shaped as q: with it, dq, dk and dv are expected, and dbias of a bias that requires
            a gradient.
        grad_lse: the gradient of lse [batch, heads, q_len]; None: zero. Needs `grad`.
        arguments: `attend`'s shorthands of patterns, `seq_lens`, `key_mask`, `scale`, `softcap`, `bias`,
            `alibi_slopes`, `first_head`, `all_heads`.

    Returns:
        By "out", "lse", "dq", "dk", "dv", "dbias": an object with `value`, a float64 tensor, and `tolerance`, a number.

    Raises:
        InvalidInput: an argument is wrong.
    """
    for name in ("layout", "dropout_p", "device", "return_lse"):
        if name in arguments:
            raise InvalidInput(f"oracle has no {name}: tensors are [batch, len, heads, head_dim], nothing is dropped")
    with torch.enable_grad():
        problem = Problem.of(q, k, v, pattern, **arguments)
    if grad_lse is not None and grad is None:
        raise InvalidInput("grad_lse was given without grad: pass zeros as grad for a loss of lse alone")
    _check_shape("grad", grad, [problem.batch, problem.q_len, problem.heads, problem.head_dim])
    _check_shape("grad_lse", grad_lse, [problem.batch, problem.heads, problem.q_len])
    trained = problem.bias_needs_grad and grad is not None
    problem = replace(problem, needs_grad=grad is not None, bias_needs_grad=trained, return_lse=True)
    masks = {name: arguments[name] for name in TENSORS if arguments.get(name) is not None}
    if isinstance(pattern, DataPattern):
        masks["pattern_data"] = pattern.data
    return expected_of(Example(problem, q, k, v, grad, masks), grad_lse)


def _check_shape(name: str, x: Tensor | None, shape: list[int]) -> None:
    if x is not None and list(x.shape) != shape:
        raise InvalidInput(f"{name} must have shape {shape}, got {list(x.shape)}")
