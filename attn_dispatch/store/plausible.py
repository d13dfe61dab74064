"""Times that no machine of a decision's silicon can have measured: the least work of the problem at a generous peak.

No table of machines: the silicon's fingerprint gives its cores or multiprocessors. The work is counted from below: half
of the pairs of dense attention, of other patterns one key for every second query that is selected. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
KINDS = ("Dense", "Window", "Dilated", "Neighborhood")  #: in others all queries may be without keys
MASKED_SHARE = 1 / 8  #: share of the pairs that the masks of a trial leave at least
# What a stored problem of an unknown kind, or a damaged one, raises.
PROBLEM_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def why_refused(decision: Decision) -> str:
    """Why another machine's decision is not believed: it is another problem's, or a time cannot be; else empty."""
    try:
        if Address.of(decision.problem, decision.silicon) != decision.address:
            return "its key is not that of its problem"
    except PROBLEM_ERRORS:
        return ""
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
    batch, heads, q_len, k_len = (float(problem[name]) for name in ("batch", "heads", "q_len", "k_len"))
    pattern = problem["pattern"].get("pattern", problem["pattern"])  # inside of a Reordered
    keys = k_len if pattern["kind"] == "Dense" else 1 / max(pattern.get("dilation_rates", (1,)))
    pairs = batch * heads * min(q_len, k_len) * keys / 2 if pattern["kind"] in KINDS else 0.0
    for mask in (problem["has_seq_lens"], problem["has_key_mask"], problem.get("bias")):
        pairs *= MASKED_SHARE if mask else 1
    operations = pairs * float(problem["head_dim"]) * (BOTH if problem["needs_grad"] else FORWARD)
    return operations / _peak_per_s(problem, silicon) * 1e3


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
