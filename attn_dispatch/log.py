"""The one logger of the package, `attn_dispatch` of the standard library's: a line at INFO for every decision, warnings
for what was ignored or kept out. `logging.getLogger("attn_dispatch").setLevel(logging.INFO)` shows the decisions.
"""

from __future__ import annotations

import logging
from functools import cache

from attn_dispatch import process_state

logger = logging.getLogger("attn_dispatch")


@cache
def say_once(text: str) -> None:
    """Warn of something once in a process, however often it is met."""
    logger.warning("%s", text)


process_state.register(process_state.FACTS, say_once.cache_clear)
