"""What a process keeps in tables of its modules, and how it is forgotten: by tests, and where an observer begins."""

from __future__ import annotations

from collections.abc import Callable

ROUTES = "routes"  #: cached routes of calls: they hide problems from observers
DECISIONS = "decisions"  #: what was decided, measured and counted
READ = "read"  #: what was read from disk, or noted there once
FACTS = "facts"  #: what was checked, registered or logged once

forgotten = 0  #: how often tables were emptied; what was worked out before that must not enter them after it

_tables: dict[str, list[Callable[[], object]]] = {ROUTES: [], DECISIONS: [], READ: [], FACTS: []}


def register(kind: str, *clear: Callable[[], object]) -> None:
    """Have tables of a kind emptied by these functions. Raises KeyError: there is no such kind."""
    _tables[kind] += clear


def forget(*kinds: str) -> None:
    """Empty the tables of these kinds."""
    global forgotten
    forgotten += 1
    for kind in kinds:
        for clear in _tables[kind]:
            clear()


def forget_all() -> None:
    """As if the process had just started. What follows from arguments alone, and the machine's own facts, stay."""
    forget(*_tables)
