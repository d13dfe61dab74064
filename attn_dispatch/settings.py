"""Settings from environment variables, read and checked at each use; and one that may be switched in a block."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from attn_dispatch.errors import InvalidInput
from attn_dispatch.log import say_once

FLASH_KERNEL = "ATTN_DISPATCH_FLASH_KERNEL"  #: a variable, see `flash_kernel`
MODES = ("tune", "online", "predict", "locked", "off")
COMPILE = ("always", "never")
NOWHERE = Path(os.devnull, "attn-dispatch")  #: stands for a missing cache folder: cannot be created, read or written
NO_HOME = "this user has no home folder that can be written; set $ATTN_DISPATCH_CACHE_DIR to a folder"


@dataclass(frozen=True, slots=True)
class Number:
    """A variable that holds a number from `low` to `high`, both included. Raises InvalidInput for another value."""

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


#: Milliseconds of measuring per unseen problem, past which no further trial is started.
budget_ms = Number("ATTN_DISPATCH_BUDGET_MS", 2000.0, 0.0, math.inf, "a number >= 0")
#: Calls per problem over which the first call's cost (planning, compilation) is spread when candidates are compared.
expected_calls = Number("ATTN_DISPATCH_EXPECTED_CALLS", 1000.0, 1.0, math.inf, "a number >= 1")
#: Seconds of measuring per minute that calls of attend() may cause; `profile` is not limited.
trial_seconds = Number("ATTN_DISPATCH_TRIAL_SECONDS", 30.0, 0.0, math.inf, "a number >= 0")
#: Seconds beyond its expected time after which a backend's call in a trial counts as hung.
timeout_s = Number("ATTN_DISPATCH_TIMEOUT_S", 30.0, 0.1, 1e6, "a number from 0.1 to 1e6")
#: Size of the cache folder in MB (10**6 bytes).
max_cache_mb = Number("ATTN_DISPATCH_CACHE_MB", 256.0, sys.float_info.min, math.inf, "a number > 0")
#: Share of the time of calls that trials beside them may take, in mode `online`.
overhead_share = Number("ATTN_DISPATCH_OVERHEAD", 0.05, 0.0, 1.0, "a number from 0 to 1")
#: Share that counts, where calls on CUDA are compared, of the host's time beyond the device's.
host_share = Number("ATTN_DISPATCH_HOST_SHARE", 0.25, 0.0, 1.0, "a number from 0 to 1")


def mode() -> str:
    """$ATTN_DISPATCH_MODE, "tune" by default. Raises InvalidInput for another value than `MODES`."""
    return _word("ATTN_DISPATCH_MODE", MODES)


def compiles() -> bool:
    """Whether calls may compile: not with $ATTN_DISPATCH_COMPILE "never" (by default "always") in mode `locked`."""
    return _word("ATTN_DISPATCH_COMPILE", COMPILE) != "never" or mode() != "locked"


def _word(variable: str, words: Sequence[str]) -> str:
    """A variable that holds one of these words, the first by default. Raises InvalidInput for another value."""
    found = os.environ.get(variable, "") or words[0]
    if found not in words:
        raise InvalidInput(f"${variable} must be one of {', '.join(words)}, got {found!r}")
    return found


def record_file() -> str | None:
    """$ATTN_DISPATCH_RECORD: the file to which this process writes its problems; None: to none."""
    named = os.environ.get("ATTN_DISPATCH_RECORD")
    return os.path.expanduser(named) if named else None


def flash_kernel() -> Path | None:
    """$ATTN_DISPATCH_FLASH_KERNEL: the folder of a build of flash-attn from the Hugging Face Hub; None: of none."""
    named = os.environ.get(FLASH_KERNEL)
    return Path(named).expanduser() if named else None


def measures() -> bool:
    """Whether calls measure, now or beside later ones. Raises as `mode`."""
    return mode() in ("tune", "online")


def cache_folder() -> Path:
    """$ATTN_DISPATCH_CACHE_DIR, else platformdirs' user cache folder; `NOWHERE`, with one warning, without a home."""
    named = os.environ.get("ATTN_DISPATCH_CACHE_DIR")
    with suppress(RuntimeError):  # no home folder
        found = Path(named).expanduser() if named else user_folder()
        if found is not None:
            return found
    say_once(f"decisions and quarantined backends are not stored: {NO_HOME}")
    return NOWHERE


def user_folder() -> Path | None:
    """platformdirs' user cache folder; None where it cannot be made. Raises RuntimeError: there is no home folder."""
    found = platformdirs.user_cache_path("attn-dispatch", appauthor=False)
    return found if _can_exist(found) else None


def _can_exist(folder: Path) -> bool:
    """Whether a folder exists or can be made: in containers, users without a name often get the home `/`."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return there == folder or os.access(there, os.W_OK | os.X_OK)


_everywhere = _word("ATTN_DISPATCH_BATCH_INVARIANT", ("0", "1")) == "1"
_asked = ContextVar("batch_invariant", default=_everywhere)
asks_invariance: Callable[[], bool] = _asked.get  #: whether this thread, or task, asks for batch invariance


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside, out and lse of a row have the same bits alone, in a batch, padded, packed, in parts and decoded, in
    any number of threads; so have gradients, but not of parts, nor where `key_mask` hides padding. Compiled and
    checkpointed calls ask again in the backward pass: it belongs inside, too.

    One backend computes all calls that are alike: the first whose bits a check on this machine finds equal.
    Nothing is measured, and other calls' decisions do not change. It holds for the thread or task that enters it;
    `$ATTN_DISPATCH_BATCH_INVARIANT=1`, which is read once, asks for it in the whole process.

    Args:
        enabled: False: calls inside do not ask for it.

    Raises:
        InvalidInput: `enabled` is not a bool. Calls inside raise NoBackend where no backend passes.
    """
    if not isinstance(enabled, bool):
        raise InvalidInput(f"enabled must be True or False, got {enabled!r}")
    before = _asked.set(enabled)
    try:
        yield
    finally:
        _asked.reset(before)
