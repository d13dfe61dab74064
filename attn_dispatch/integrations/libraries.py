"""Loads the libraries that attend() is made the attention of; none of them comes with this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.torch_version import TorchVersion


def library(name: str, oldest: str) -> Any:
    """The module of this name, of version `oldest` or newer.

    By name, so that type checkers need not find the library.

    Raises:
        ImportError: it is not installed, or older; the message has the command that installs it.
    """
    needed = f"attn_dispatch.integrations.{name} needs {name} {oldest} or newer: pip install '{name}>={oldest}'"
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # something that the library itself needs
        raise ModuleNotFoundError(f"{needed} ({name} is not installed)", name=name) from error
    if TorchVersion(found.__version__) < oldest:
        raise ImportError(f"{needed} ({found.__version__} is installed)", name=name)
    return found
