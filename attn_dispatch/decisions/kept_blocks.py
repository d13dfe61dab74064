"""The blocks of Triton's kernels that won a race on this machine, so that a race is run once.

    <cache folder>/blocks/<silicon>.json

One checked file, read once in a process. It counts for the version of `triton` that raced: another one, with other
kernels, takes the table's blocks; so it is without a file, or with a damaged one. No torch here: `inspect` must start
at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from attn_dispatch import process_state
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.store import files
from attn_dispatch.store.address import SILICON, fingerprint
from attn_dispatch.text import printable

if TYPE_CHECKING:
    import torch

    from attn_dispatch.kernels.triton.blocks import BlockConfig


class Winner(msgspec.Struct, frozen=True):
    """A block, how much faster the race's call was with it than with the table's block, and when (UTC)."""

    rows: int
    columns: int
    warps: int
    stages: int
    speedup: float
    measured: str

    def __str__(self) -> str:
        block = f"{self.rows} x {self.columns}, {self.warps} warps, {self.stages} stages"
        return f"{block}: {self.speedup:.2f} times as fast as the table's block"


class Kept(msgspec.Struct, frozen=True):
    """The version that raced, and the winners by use, such as "forward bfloat16 128"."""

    version: str = ""
    winners: dict[str, Winner] = {}


_known: dict[Path, Kept] = {}
process_state.register(process_state.READ, _known.clear)


def read(folder: Path, silicon: str) -> Kept:
    """What is kept for a silicon, whatever its version; empty where nothing is."""
    path = _path(folder, silicon)
    if path not in _known:
        _known[path] = _read(path)
    return _known[path]


def keep(silicon: str, version: str, winners: Mapping[str, Winner]) -> None:
    """Add winners to those of the same version; in this process only, logged once, where they cannot be written."""
    folder = cache_folder()
    path, there = _path(folder, silicon), read(folder, silicon)
    try:
        with files.locked(folder, path.parent):
            there = _read(path)  # another process may have added to it
            files.write_checked(folder, path, _merged(there, version, winners))
    except OSError as error:
        files.say_unwritten("raced blocks are not kept", path.parent, error)
    process_state.forget(process_state.READ)  # what was worked out from the blocks before
    _known[path] = _merged(there, version, winners)


def winner_of(use: str, device: torch.device) -> BlockConfig | None:
    """`winner_of` of kernels/triton/blocks.py, from the cache folder."""
    folder = cache_folder()
    if mode() == "off" or not (_known or (folder / "blocks").is_dir()):
        return None
    from attn_dispatch.kernels.triton import support
    from attn_dispatch.kernels.triton.blocks import BlockConfig
    from attn_dispatch.machine.hardware import silicon

    kept = read(folder, silicon(device))
    found = kept.winners.get(use) if kept.version == support.version() else None
    return None if found is None else BlockConfig(found.rows, found.columns, found.warps, found.stages)


def of_all(folder: Path) -> dict[str, Kept]:
    """What is kept, by silicon."""
    names = sorted(path.stem for path in (folder / "blocks").glob("*.json"))
    return {name: read(folder, name) for name in names if SILICON.fullmatch(name)}


def lines(folder: Path) -> list[str]:
    """What is kept, for `inspect`."""
    found: list[str] = []
    for silicon, kept in of_all(folder).items():
        if kept.winners:
            found.append(f"blocks of triton {kept.version} measured on {silicon}:")
            found += [f"  {use}: {winner}" for use, winner in sorted(kept.winners.items())]
    return [printable(line) for line in found]


def _merged(there: Kept, version: str, winners: Mapping[str, Winner]) -> Kept:
    return Kept(version, {**(there.winners if there.version == version else {}), **winners})


def _path(folder: Path, silicon: str) -> Path:
    return folder / "blocks" / f"{fingerprint(silicon)}.json"


def _read(path: Path) -> Kept:
    return files.read_or_none(path, lambda path: files.read_checked(path, Kept)) or Kept()
