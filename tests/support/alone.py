"""Functions for a process of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

Begin = Callable[[], object]


def pid(begin: Begin, given: object) -> list[object]:
    begin()
    return [os.getpid(), given, os.environ.get("ATTN_DISPATCH_TEST")]


def dies(begin: Begin, at: str, how: str) -> list[object]:
    """Before it has begun, or later; by an exception, an exit, a signal or never."""
    if at == "later":
        begin()
    if how == "raises":
        raise ValueError("no")
    if how == "exits":
        os._exit(3)
    if how == "hangs":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)
    return []


def loses_device(begin: Begin) -> list[object]:
    """An index beyond a tensor on CUDA ends the context; what the guard makes of it."""
    import torch

    from attn_dispatch.tuning import guard

    device = torch.device("cuda", torch.cuda.current_device())
    row, beyond = torch.ones(3, device=device), torch.tensor([99], device=device)
    begin()
    try:
        row[beyond].sum().item()
    except RuntimeError as error:
        return [guard.device_fault(device, error, 30.0)]
    return [None]
