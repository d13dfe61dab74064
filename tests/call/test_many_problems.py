"""A process that sees ever new lengths keeps a bounded number of everything: tables, routes, decisions."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

import pytest
import torch

from attn_dispatch import Window, attend
from attn_dispatch.calls import packing, routes
from attn_dispatch.decisions import call, decide

LIMITS = {"MAX_ROUTES", "MAX_CALLS", "MAX_DECISIONS", "MAX_ON_TRIAL"}


def sizes() -> dict[str, int]:
    """The entries of every table at the top of a module, and of every cache that has no limit of its own."""
    found = {}
    for name, module in list(sys.modules.items()):
        for what, value in list(vars(module).items()) if name.startswith("attn_dispatch.") else ():
            if isinstance(value, dict | set | list | deque):
                found[f"{name}.{what}"] = len(value)
            elif getattr(value, "cache_info", None) and value.cache_info().maxsize is None:
                found[f"{name}.{what}"] = value.cache_info().currsize
    return found


@pytest.mark.parametrize("mode", ["off", "predict", "online", "tune"])
def test_no_table_grows_with_the_lengths_that_were_called(
    mode: str, set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(mode)
    monkeypatch.setenv("ATTN_DISPATCH_TRIAL_SECONDS", "0")
    for module in (routes, call, packing, decide):
        for name in vars(module).keys() & LIMITS:
            monkeypatch.setattr(module, name, 12)

    def run(lengths: range) -> None:
        for length in lengths:
            x, keys = torch.ones(1, length, 1, 8), torch.ones(1, 100 + length, 1, 8)
            attend(x, x, x, is_causal=True)
            attend(x, x, x, Window(2, 0), backend="manual", order="natural")
            attend(x[:, :1], keys, keys)
            attend(x, x, x, documents=(torch.arange(length) // 9)[None])

    run(range(20, 40))
    before = sizes()
    run(range(40, 70))
    assert {name: n - before.get(name, 0) for name, n in sizes().items() if n > before.get(name, 0) + 2} == {}
