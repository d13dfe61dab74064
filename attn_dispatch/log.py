"""The package's logger, `attn_dispatch` in the standard library's logging.

It logs a line at INFO for every decision, and warnings for ignored files and quarantined backends.
`logging.getLogger("attn_dispatch").setLevel(logging.INFO)` shows the decisions.
"""

from __future__ import annotations

import logging
from functools import cache

from attn_dispatch import process_state

logger = logging.getLogger("attn_dispatch")


@cache
def say_once(text: str) -> None:
    """Log a warning, each text at most once in a process."""
    logger.warning("%s", text)


process_state.register(process_state.FACTS, say_once.cache_clear)
