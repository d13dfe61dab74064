"""Token orders: permutations of the sequence that the dispatcher may choose. Only the natural one so far."""

from __future__ import annotations

from attn_dispatch.errors import InvalidInput

NATURAL = "natural"
ORDERS = (NATURAL,)


def check(order: object) -> str:
    """The order's name.

    Raises:
        InvalidInput: there is no such order.
    """
    if order not in ORDERS:
        raise InvalidInput(f"order must be None or one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    return str(order)
