"""The address of a decision in the store: three names, which make a path within the store and none outside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_dispatch.spec.groups import group_of, key_of

KEY = re.compile(r"[0-9a-f]{20}")
GROUP = re.compile(r"[0-9a-f]{12}")
SILICON = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
#: The paths that a store writes below its folder; those that end in .tmp are being written.
STORED = re.compile(rf"{SILICON.pattern}/{GROUP.pattern}/({KEY.pattern}\.json|\.{KEY.pattern}-[0-9a-f]{{8}}\.tmp)")

#: Raised where a stored problem is damaged or of an unknown kind.
PROBLEM_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def fingerprint(text: str) -> str:
    """The text, which is safe as a file's name. Raises ValueError: it is no fingerprint of a machine."""
    if not SILICON.fullmatch(text):
        raise ValueError(f"not a fingerprint: {text!r}")
    return text


class Address(NamedTuple):
    """The fingerprint of a machine, or of all ranks' machines; the digits of a group of problems, and of a problem."""

    silicon: str
    group: str
    key: str

    @classmethod
    def of(cls, problem: Mapping[str, Any], silicon: str) -> Address:
        """The address of a problem as `Problem.to_dict` writes it. Raises KeyError, TypeError: it is none."""
        return cls(silicon, group_of(problem), key_of(problem, silicon))

    @property
    def is_valid(self) -> bool:
        return bool(KEY.fullmatch(self.key) and GROUP.fullmatch(self.group) and SILICON.fullmatch(self.silicon))
