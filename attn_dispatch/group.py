"""Which problems can be evidence for one another: those that differ in sizes alone. No torch here.

A group is (dtype, head_dim, pattern class, direction), and whether tensors mask keys or weights are dropped. Within
one, lengths, batch, heads, windows and segments may differ; what was measured at some says something of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SIZES = ("segment_lengths", "left", "right", "grid", "window")  #: of a pattern; all else is its class
EXACT = ("dtype", "head_dim", "needs_grad", "has_seq_lens", "has_key_mask", "device")
DIGITS = 12


def describe(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The group of a problem as `Problem.to_dict` writes it, in plain values."""
    found = {name: problem[name] for name in EXACT}
    found["pattern"] = pattern_class(problem["pattern"])
    found["dropout"] = problem["dropout_p"] > 0
    found["ranks"] = problem["ranks"]
    return found


def group_of(problem: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that name the group.

    Raises:
        KeyError, TypeError: it is not a problem.
    """
    text = json.dumps(describe(problem), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def pattern_class(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """A pattern without its sizes: its kind, whether it is causal, its rates, how many axes a grid has."""
    found = {name: value for name, value in pattern.items() if name not in SIZES}
    if "grid" in pattern:
        found["axes"] = len(pattern["grid"])
    if "right" in pattern:
        found["ahead"] = pattern["right"] != 0
    return found
