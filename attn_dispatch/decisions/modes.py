"""What each mode allows: one order of steps from what is stored to the static choice, for one device and for ranks."""

from __future__ import annotations

from typing import Protocol

from attn_dispatch.settings import mode
from attn_dispatch.store.decision import Decision


class Steps(Protocol):
    """The ways to a decision about one problem; each returns None where it leads to none."""

    def stored(self) -> Decision | None:
        """What is stored, where it can be gone by as it is."""

    def refused(self) -> Decision:  # pyright: ignore[reportReturnType]
        """Nothing stored can be gone by in locked mode. Raises NotDecided, unless it is only explained."""

    def measured(self) -> Decision | None:
        """What a trial finds now."""

    def predicted(self) -> Decision | None:
        """What is known without a trial."""

    def static(self) -> Decision:  # pyright: ignore[reportReturnType]
        """The static choice; without a choice where there is none."""


def decide_by_mode(steps: Steps, *, force: bool = False) -> Decision:
    """The decision that $ATTN_DISPATCH_MODE leads to; with `force`, a trial whatever is stored and whatever the mode.

    Raises:
        NotDecided: see `Steps.refused`.
    """
    setting = "tune" if force else mode()
    if setting == "off":
        return steps.static()
    found = None if force else steps.stored()
    if found is None and setting == "locked":
        return steps.refused()
    if found is None and setting == "tune":
        found = steps.measured()
    return found or steps.predicted() or steps.static()
