"""Whether a row's results must have the same bits whatever else is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attn_dispatch.settings import batch_invariant as by_environment
from attn_dispatch.spec.checks import boolean

_asked = ContextVar("batch_invariant", default=by_environment())
asked: Callable[[], bool] = _asked.get  #: whether this thread, or task, asks for it


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside, out and lse of a row have the same bits alone, in a batch, padded, packed, in parts and decoded, with any
    number of threads.

    One backend computes all calls alike in this: the first whose bits a check on this machine finds equal. Nothing is
    measured. It holds for the thread or task that enters it; `$ATTN_DISPATCH_BATCH_INVARIANT=1`, read when the first
    call is made, for the whole process. Decisions without it do not change.

    Args:
        enabled: False: calls inside do not ask for it.

    Raises:
        InvalidInput: `enabled` is not a bool. Calls inside raise NoBackend where no backend passes.
    """
    boolean("enabled", enabled)
    before = _asked.set(enabled)
    try:
        yield
    finally:
        _asked.reset(before)
