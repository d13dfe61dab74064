"""Write the stored decisions into one file, for other machines of the same kind; the same ones give the same bytes."""

from __future__ import annotations

import argparse
import os

from attn_dispatch.cli import stored, urls
from attn_dispatch.cli.tables import print_json
from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.store.bundle import write_bundle

EXAMPLE = """examples:
  attn-dispatch export decisions.json
  attn-dispatch export s3://bucket/decisions.json --silicon cuda-sm90
      of one kind of device, to any URL that fsspec supports; 'attn-dispatch doctor' lists this machine's kinds"""


def configure(parser: argparse.ArgumentParser) -> None:
    where = "file to write, or a URL (with ://)"
    parser.add_argument("place", metavar="FILE-or-URL", type=urls.target, help=where)
    silicon = "only decisions of devices whose fingerprint starts with PREFIX, such as cuda-sm90 or cpu-amd-epyc"
    parser.add_argument("--silicon", metavar="PREFIX", default="", help=silicon)
    parser.add_argument("--key", metavar="PREFIX", default="", help="only decisions whose key starts with PREFIX")


def run(args: argparse.Namespace) -> int:
    folder = stored.existing_folder()
    silicon, key = args.silicon.strip().lower(), args.key.strip().lower()
    if not os.path.lexists(folder):
        raise AttnDispatchError(f"nothing is written: {folder} cannot be read (No such file or directory)")
    found = [decision for _, decision in stored.decisions(folder, silicon=silicon, key=key)]
    if not found and (silicon or key):
        raise AttnDispatchError(f"no decision in {folder} matches --silicon and --key")
    content = write_bundle(found)
    urls.write(args.place, content)
    with urls.beside(args.place):
        if args.json:
            print_json({"folder": str(folder), "place": args.place, "decisions": len(found), "bytes": len(content)})
        else:
            print(f"{len(found)} decisions from {folder} written to {args.place} ({len(content)} bytes)")
    return 0
