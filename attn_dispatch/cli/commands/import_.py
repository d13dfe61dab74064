"""Merge decisions from files into the stored ones: each candidate's latest measurement counts, in whatever order files
are read, and what was measured on this machine stays. Imported decisions are used once a short check here has confirmed
them. Where some for this processor run by `native`, it is compiled."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from attn_dispatch.cli import urls
from attn_dispatch.cli.tables import Table, print_json
from attn_dispatch.errors import BackendFailed
from attn_dispatch.settings import existing_cache_folder
from attn_dispatch.store.bundle import Refused, is_of_another_problem, read_bundle
from attn_dispatch.store.decision import Damaged, Decision, from_elsewhere
from attn_dispatch.store.folder import Store
from attn_dispatch.text import printable

EXAMPLE = """examples:
  attn-dispatch import decisions.json
  attn-dispatch import s3://bucket/decisions.json /home/other/.cache/attn-dispatch
      exit code 1 if some could not be read"""

OUTCOMES = ("added", "merged", "unchanged", "refused")


class Source(NamedTuple):
    """One argument: the outcome of each of its decisions, what was refused with reasons, the silicons of `native`."""

    name: str
    outcomes: list[str]
    refused: list[Refused]
    native: set[str]

    @property
    def counts(self) -> dict[str, int]:
        return {how: self.outcomes.count(how) for how in OUTCOMES}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("places", metavar="FILE-or-URL", nargs="+",
        help="a file that export wrote, a single decision, a folder of either, or a URL (with ://)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    folder = existing_cache_folder()
    sources = [_import(name, Store(folder)) for name in args.places]
    kernel = _native(set.union(*(source.native for source in sources)))
    if args.json:
        total = {how: sum(source.counts[how] for source in sources) for how in OUTCOMES}
        print_json({"folder": str(folder), "native": kernel, **total, "sources": list(map(_to_dict, sources))})
    else:
        rows = [[source.name, *map(str, source.counts.values())] for source in sources]
        print(*Table(("from", *OUTCOMES), rows, {0}).lines(), "", sep="\n")
        for what, reason in (refused for source in sources for refused in source.refused):
            print(printable(f"refused   {what}: {reason}"))
        print(f"stored in {folder}", *([f"native: {kernel}"] if kernel else []), sep="\n")
    return 1 if any(source.refused for source in sources) else 0


def _to_dict(source: Source) -> dict[str, Any]:
    reasons = [{"what": what, "reason": reason} for what, reason in source.refused]
    return {"name": source.name, **source.counts, "reasons": reasons}


def _import(name: str, store: Store) -> Source:
    source = Source(name, [], [], set())
    for found in _decisions(name):
        how = found if isinstance(found, Refused) else _store(found, store)
        if isinstance(how, Refused):
            source.refused.append(how)
        elif isinstance(found, Decision) and found.choice == "native":
            source.native.add(found.silicon)
        source.outcomes.append("refused" if isinstance(how, Refused) else how)
    return source


def _native(silicons: set[str]) -> str | None:
    """Compile the kernel of `native` if decisions of this processor run by it, so that no call waits for that.

    Returns:
        What runs then, or why nothing can; None where no decision needs it.
    """
    if not silicons:
        return None
    from attn_dispatch.kernels.native import library
    from attn_dispatch.machine.hardware import silicon

    chip = silicon("cpu").rpartition("-")[0]  # without the number of threads
    if chip not in {each.rpartition("-")[0] for each in silicons}:
        return None
    with suppress(ImportError, BackendFailed):
        if not library.is_compiled():
            print("attn-dispatch import: compiling native, which takes up to a minute", file=sys.stderr)
        library.load()
        library.keep()
    return library.in_use()


def _decisions(name: str) -> Iterator[Decision | Refused]:
    unreadable: list[OSError] = []
    paths = urls.each_file(name, unreadable.append)
    for error in unreadable:
        yield Refused(str(error.filename), error.strerror or str(error))
    for path in paths:
        try:
            found = read_bundle(urls.read(path))
        except (urls.Unreachable, Damaged) as error:
            yield Refused(path, str(error))
            continue
        for each in found:
            yield each._replace(what=f"{path}, {each.what}") if isinstance(each, Refused) else each


def _store(decision: Decision, store: Store) -> str | Refused:
    what = f"{decision.silicon}, key {decision.key}"
    if is_of_another_problem(decision):
        return Refused(what, "its key is not that of its problem")
    try:
        return store.add(from_elsewhere(decision, "imported"))
    except OSError as error:
        return Refused(what, f"cannot be stored: {error.strerror or error}")
    except Damaged as error:
        return Refused(what, str(error))
