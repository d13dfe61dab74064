"""Merge decisions from files into the stored ones: each candidate's latest measurement counts, in whatever order files
are read, and what was measured on this machine stays. Imported decisions are used once a short check here confirmed
them; `warm` then compiles what they run by."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attn_dispatch.cli import stored, urls
from attn_dispatch.cli.tables import Table, print_json
from attn_dispatch.store.bundle import Refused, is_of_another_problem, read_bundle
from attn_dispatch.store.decision import Damaged, Decision, from_elsewhere
from attn_dispatch.store.folder import Store
from attn_dispatch.text import printable

EXAMPLE = """examples:
  attn-dispatch import decisions.json
  attn-dispatch import s3://bucket/decisions.json /home/other/.cache/attn-dispatch
      exit code 1 if some could not be read"""

OUTCOMES = ("added", "merged", "unchanged", "refused")


class Outcome(NamedTuple):
    """What became of a decision; of one that is refused, what it is and why."""

    how: str
    what: str = ""
    reason: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    places = "a file that export wrote, a single decision, a folder of either, or a URL (with ://)"
    parser.add_argument("places", metavar="FILE-or-URL", nargs="+", help=places)


def run(args: argparse.Namespace) -> int:
    folder = stored.existing_folder()
    sources = [(name, [_outcome(found, Store(folder)) for found in _decisions(name)]) for name in args.places]
    every = [outcome for _, found in sources for outcome in found]
    refused = [each for each in every if each.how == "refused"]
    if args.json:
        made = [{"name": name, **_counts(found), "reasons": _reasons(found)} for name, found in sources]
        print_json({"folder": str(folder), **_counts(every), "sources": made})
    else:
        rows = [[name, *map(str, _counts(found).values())] for name, found in sources]
        print(*Table(("from", *OUTCOMES), rows, {0}).lines(), "", sep="\n")
        for each in refused:
            print(printable(f"refused   {each.what}: {each.reason}"))
        print(f"stored in {folder}")
    return 1 if refused else 0


def _counts(found: Sequence[Outcome]) -> dict[str, int]:
    return {how: sum(each.how == how for each in found) for how in OUTCOMES}


def _reasons(found: Sequence[Outcome]) -> list[dict[str, str]]:
    return [{"what": each.what, "reason": each.reason} for each in found if each.how == "refused"]


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


def _outcome(found: Decision | Refused, store: Store) -> Outcome:
    if isinstance(found, Refused):
        return Outcome("refused", *found)
    what, why = f"{found.silicon}, key {found.key}", ""
    if is_of_another_problem(found):
        why = "its key is not that of its problem"
    try:
        if not why:
            return Outcome(store.add(from_elsewhere(found, "imported")))
    except OSError as error:
        why = f"cannot be stored: {error.strerror or error}"
    except Damaged as error:
        why = str(error)
    return Outcome("refused", what, why)
