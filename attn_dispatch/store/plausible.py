"""Times that no machine of a decision's silicon can have measured: the least work of the problem at a generous peak.

No table of machines: the silicon's fingerprint gives its cores or multiprocessors. The work is counted from below: of a
dilated pattern only the largest branch, at borders of windows half of the keys. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from attn_dispatch.store.address import Address
from attn_dispatch.store.decision import TIMED, Decision

CORES = re.compile(r"^cpu-.*-(\d+)c-(\d+)t$")
MULTIPROCESSORS = re.compile(r"^cuda-sm\d+-(\d+)sm-")
CPU_HZ, CUDA_HZ = 6e9, 3e9  #: above every clock that is sold
CORE_OPERATIONS = 64  #: float32 operations of a core and cycle: two fused multiply-adds of 512 bits
HALF_FACTOR = 2  #: factor for 16-bit types
MATRIX_OPERATIONS = 4096  #: operations of a core and cycle with a matrix unit (AMX, SME)
MULTIPROCESSOR_OPERATIONS = 16384  #: operations of a multiprocessor and cycle, in any type
FORWARD, BOTH = 4, 12  #: least operations per visible pair and entry of head_dim: forward, forward and backward
MASKED_SHARE = 1 / 8  #: share of the pairs that the masks of a trial leave at least
SIZES = ("q_len", "k_len", "heads")
# What a stored problem of an unknown kind, or a damaged one, raises.
PROBLEM_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ArithmeticError)


def why_refused(decision: Decision) -> str:
    """Why another machine's decision is not believed: it is another problem's, or a time cannot be; else empty."""
    with suppress(*PROBLEM_ERRORS):
        if Address.of(decision.problem, decision.silicon) != decision.address:
            return "its key is not that of its problem"
    return impossible_time(decision)


def impossible_time(decision: Decision) -> str:
    """Why one of the decision's times cannot be true; empty where all can, or nothing is known."""
    try:
        least_ms = least_time_ms(decision.problem, decision.silicon)
    except PROBLEM_ERRORS:
        return ""
    for row in decision.candidates:
        times = [each for each in (row.fastest_ms, row.low_ms, row.median_ms) if each is not None]
        if row.status in TIMED and times and min(times) < least_ms:
            return (
                f"{min(times):.3g} ms of {row.backend} is impossible: this problem takes {least_ms:.3g} ms at the "
                f"peak of {decision.silicon}"
            )
    return ""


def least_time_ms(problem: Mapping[str, Any], silicon: str) -> float:
    """Milliseconds that a problem, as `Problem.to_dict` writes it, takes at the silicon's peak; 0 if that is unknown.

    Raises:
        KeyError, TypeError, ValueError, ArithmeticError: `problem` is invalid.
    """
    pairs = float(problem["batch"]) * _least_pairs(problem["pattern"], *(float(problem[name]) for name in SIZES))
    for mask in (problem["has_seq_lens"], problem["has_key_mask"], problem.get("bias")):
        pairs *= MASKED_SHARE if mask else 1
    operations = pairs * float(problem["head_dim"]) * (BOTH if problem["needs_grad"] else FORWARD)
    peak = _peak_per_s(problem, silicon)
    return operations / peak * 1e3


def _peak_per_s(problem: Mapping[str, Any], silicon: str) -> float:
    """Operations per second, generously; infinity for an unknown fingerprint."""
    gpu, cpu = MULTIPROCESSORS.match(silicon), CORES.match(silicon)
    if gpu is not None:
        return int(gpu[1]) * CUDA_HZ * MULTIPROCESSOR_OPERATIONS
    if cpu is None:
        return math.inf
    narrow = problem["dtype"] in ("bfloat16", "float16") or problem["matmul_precision"] != "highest"
    each = CORE_OPERATIONS * (HALF_FACTOR if narrow else 1)
    if re.search(r"-(amx_|sme)", silicon):
        each = MATRIX_OPERATIONS
    return max(map(int, cpu.groups())) * CPU_HZ * each


def _least_pairs(pattern: Mapping[str, Any], q_len: float, k_len: float, heads: float) -> float:
    """Pairs of a query and a key that it sees, of all heads of one sequence, counted from below."""
    kind, shorter = pattern["kind"], min(q_len, k_len)
    if kind == "Reordered":
        return _least_pairs(pattern["pattern"], q_len, k_len, heads)
    if kind == "Dense":
        seen = shorter * k_len - shorter * (shorter - 1) / 2 if pattern["is_causal"] else q_len * k_len
    elif kind == "Window":
        sides = [k_len if side is None else float(side) for side in (pattern["left"], pattern["right"])]
        seen = shorter * min(sum(sides) + 1, shorter) / 2
    elif kind == "Dilated":
        branches = zip(pattern["segment_lengths"], pattern["dilation_rates"], strict=True)
        seen = max(_branch_pairs(q_len, float(length), float(rate)) for length, rate in branches)
        seen /= (2 if pattern["is_causal"] else 1) * (1 if pattern["heads"] == "all" else heads)
    else:
        axes = zip(pattern["window"], pattern["is_causal"], strict=True)
        seen = q_len * math.prod(1 if causal else max(1, window // 2) for window, causal in axes)
    return heads * seen


def _branch_pairs(tokens: float, length: float, rate: float) -> float:
    """Of one branch that is not causal, for a head in it."""
    length = min(length, tokens)
    return tokens // length * (length // rate) ** 2
