"""What environment variables set, checked when they are asked for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from attn_dispatch.errors import InvalidInput
from attn_dispatch.log import say_once

MODES = ("tune", "predict", "locked", "off")
NOWHERE = Path(os.devnull, "attn-dispatch")  #: in place of a folder that cannot be had: nothing is ever there

DEFAULT_MB = 256.0
NO_HOME = "nothing is kept: this user has no home folder; $ATTN_DISPATCH_CACHE_DIR can name another folder"


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


def cache_folder() -> Path:
    """$ATTN_DISPATCH_CACHE_DIR, else platformdirs' user cache folder; `NOWHERE`, said once, without a home."""
    named = os.environ.get("ATTN_DISPATCH_CACHE_DIR")
    try:
        return Path(named).expanduser() if named else platformdirs.user_cache_path("attn-dispatch", appauthor=False)
    except RuntimeError:
        say_once(NO_HOME)
        return NOWHERE


def _most_bytes() -> float:
    """$ATTN_DISPATCH_CACHE_MB, in bytes."""
    text = os.environ.get("ATTN_DISPATCH_CACHE_MB", "")
    try:
        value = float(text) if text else DEFAULT_MB
    except ValueError:
        value = math.nan
    if not value > 0:
        raise InvalidInput(f"$ATTN_DISPATCH_CACHE_MB must be a number > 0, got {text!r}")
    return value * 1e6
