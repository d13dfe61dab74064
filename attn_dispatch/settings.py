"""What environment variables set, checked when they are asked for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from attn_dispatch.errors import InvalidInput

MODES = ("tune", "predict", "locked", "off")


@dataclass(frozen=True, slots=True)
class Number:
    """A variable that holds a number within bounds, both allowed."""

    variable: str
    default: float
    low: float
    high: float
    what: str

    def __call__(self) -> float:
        text = os.environ.get(self.variable, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            raise InvalidInput(f"${self.variable} must be {self.what}, got {text!r}")
        return value


#: Milliseconds after which no further trial of one unseen problem is started.
budget_ms = Number("ATTN_DISPATCH_BUDGET_MS", 2000.0, 0.0, math.inf, "a number >= 0")
#: Calls of one problem that the first call's cost (plans, compilers) is spread over when candidates are compared.
expected_calls = Number("ATTN_DISPATCH_EXPECTED_CALLS", 1000.0, 1.0, math.inf, "a number >= 1")
#: Seconds of measuring that calls of attend() may cause in any minute; `profile` is not bound by it.
trial_seconds = Number("ATTN_DISPATCH_TRIAL_SECONDS", 30.0, 0.0, math.inf, "a number >= 0")
#: Seconds that a backend's call may take longer in a trial than was to be expected, before it counts as hung.
timeout_s = Number("ATTN_DISPATCH_TIMEOUT_S", 30.0, 0.1, 1e6, "a number from 0.1 to 1e6")
#: Share of calls that the drift sentinel times.
sentinel_share = Number("ATTN_DISPATCH_SENTINEL", 0.0, 0.0, 1.0, "a number from 0 to 1")


def mode() -> str:
    """$ATTN_DISPATCH_MODE."""
    found = os.environ.get("ATTN_DISPATCH_MODE", "") or "tune"
    if found not in MODES:
        raise InvalidInput(f"$ATTN_DISPATCH_MODE must be one of {', '.join(MODES)}, got {found!r}")
    return found
