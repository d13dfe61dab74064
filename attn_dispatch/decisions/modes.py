"""The modes: which steps lead to a decision, and in which order; shared by one device and ranks."""

from __future__ import annotations

from typing import Protocol

from attn_dispatch.settings import mode
from attn_dispatch.store.decision import Decision


class Steps(Protocol):
    """The steps to a decision about one problem; each returns None if it finds none.

    * `stored`: the stored decision, if it is valid. `measured`: that of a trial run now.
    * `locked_miss`: raises NotDecided where locked mode has no valid stored decision, unless the call only explains.
    * `deferred`: a decision that needs no trial; else a trial is to be run between calls.
    * `predicted`: from evidence without a trial. `static`: its `choice` is empty if no candidate can run.
    """

    def stored(self) -> Decision | None: ...
    def locked_miss(self) -> Decision: ...
    def measured(self) -> Decision | None: ...
    def deferred(self) -> Decision | None: ...
    def predicted(self) -> Decision | None: ...
    def static(self) -> Decision: ...


def decide_by_mode(steps: Steps, *, force: bool = False) -> Decision:
    """The decision by $ATTN_DISPATCH_MODE; with `force`, a trial regardless of mode and stored decision.

    Raises:
        NotDecided: see `Steps.locked_miss`.
    """
    setting = "tune" if force else mode()
    if setting == "off":
        return steps.static()
    found = None if force else steps.stored()
    if found is None and setting == "locked":
        return steps.locked_miss()
    if found is None and setting == "tune":
        found = steps.measured()
    if found is None and setting == "online":
        found = steps.deferred()
    return found or steps.predicted() or steps.static()
