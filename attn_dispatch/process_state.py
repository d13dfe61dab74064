"""What a process keeps in tables of its modules, and how it is forgotten: by tests, and where an observer begins.

And its locks, which no thread of a forked child holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

from attn_dispatch.system import in_forked_child

ROUTES = "routes"  #: cached routes of calls: they hide problems from observers
ON_DEVICE = "on device"  #: those of calls on one device, not over ranks, which forget theirs together
DECISIONS = "decisions"  #: what was decided, measured and counted
READ = "read"  #: what was read from disk, or noted there once
FACTS = "facts"  #: what was checked, registered or logged once

forgotten = 0  #: how often tables were emptied; what was worked out before that must not enter them after it

_tables: dict[str, list[Callable[[], object]]] = {ROUTES: [], ON_DEVICE: [], DECISIONS: [], READ: [], FACTS: []}


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


_locks: WeakSet[threading.Lock | threading.RLock] = WeakSet()


def lock() -> threading.Lock:
    """A lock that is free in a forked child: the thread that held it does not exist there."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """A reentrant `lock`."""
    made = threading.RLock()
    _locks.add(made)
    return made


#: Held while a thread starts another one: until that one runs, CPython takes the identity of its parent for its own, so
#: that an exception for the parent would end it, and the parent would wait for it for ever.
starting = lock()


def _free_locks() -> None:
    for each in _locks:
        each._at_fork_reinit()  # type: ignore[union-attr]


in_forked_child(_free_locks)
