"""Other libraries beside attend(), on the same inputs in the same rounds: times, errors against float64, memory, and
what each refuses.

    python -m tools.bench peers
    python -m tools.bench peers --only neighborhood NATTEN    rows whose titles contain all of these

Install the libraries without their dependencies, which would bring another torch:

    pip install --no-deps einops==0.8.2 hyper-connections local-attention==1.11.2 natten==0.21.7
    pip install --no-deps dilated-attention-pytorch==0.2.0 git+https://github.com/microsoft/torchscale

Each cell (a problem, length, dtype and pass) is a new process. A call that is predicted to
take more than LIMIT_S, from the same peer's time at the next shorter length, is left out, and so is one for which
memory does not suffice; the rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_dispatch.machine.environment import installed
from attn_dispatch.machine.load import is_calm
from attn_dispatch.text import gib, milliseconds
from tools.lib.common import RESULTS, parser, write
from tools.lib.peer_calls import HEAD_DIM, PEERS, PROBLEMS, Cell, Peer, peers_of
from tools.lib.peer_cells import HOPELESS
from tools.lib.tables import Table, direction, interval

TAKES = "15 minutes"
LIMIT_S = 4.0  #: predicted seconds of a call, beyond which it is left out
CELL_S = 150.0  #: seconds after which a cell's process is ended, and the peer that it was asking left out
ROOT = RESULTS.parents[1]
DTYPES = ("float32", "bfloat16")
Row = dict[str, Any]
Times = dict[tuple[str, str, bool, str], tuple[Cell, float]]  #: of the longest cell so far, in milliseconds


def cells() -> Iterator[Cell]:
    """By problem, dtype and pass, with growing numbers of tokens."""
    for name, asked in PROBLEMS.items():
        for dtype in DTYPES:
            for backward in (False, True):
                every = asked.trained if backward else asked.tokens
                yield from (Cell(name, tokens, dtype, backward) for tokens in every)


def wanted(cell: Cell, words: Sequence[str]) -> list[str]:
    """The peers of a cell whose titles contain all of these words."""
    titles = {peer.name: cell.title(peer.name) for peer in peers_of(cell.name)}
    plain = [re.sub(r"(?<=\d),(?=\d{3})", "", word) for word in words]  # 1,024 is what the pages print
    return [name for name, title in titles.items() if all(word in title for word in plain)]


def left_out(cell: Cell, missing: Mapping[str, str], times: Times) -> dict[str, str]:
    """Why peers are not asked, by name."""
    found = {}
    for peer in peers_of(cell.name):
        reason = missing.get(peer.name) or uncompiled(peer, cell) or too_slow(peer, cell, times)
        if reason:
            found[peer.name] = reason
    return found


def uncompiled(peer: Peer, cell: Cell) -> str:
    if peer.only_tokens is None or cell.tokens in peer.only_tokens:
        return ""
    lengths = " and ".join(f"{each:,}" for each in peer.only_tokens)
    return f"compiles for each length anew: asked at {lengths} tokens only, where the first call shows what that takes"


def too_slow(peer: Peer, cell: Cell, times: Times) -> str:
    known = times.get((cell.name, cell.dtype, cell.backward, peer.name))
    if known is None:
        return ""
    shorter, ms = known
    predicted = ms * peer.work(cell) / peer.work(shorter)
    times[cell.name, cell.dtype, cell.backward, peer.name] = cell, predicted
    if predicted <= LIMIT_S * 1e3:
        return ""
    return f"predicted {milliseconds(predicted)}, from {shorter.tokens:,} tokens by its pairs; over {LIMIT_S:g} s"


def measured(cell: Cell, names: Sequence[str], reasons: Mapping[str, str], folder: Path) -> list[Row]:
    """The rows of a cell. A peer whose call ends the process, or does not end, gets that as its reason; the others are
    then asked again.
    """
    reasons = dict(reasons)
    file = folder / "rows.json"
    while True:
        file.write_text("{}")
        given = json.dumps({"cell": cell, "peers": names, "left_out": reasons})
        ended = run([sys.executable, "-m", "tools.lib.peer_cells", given, str(file)], folder)
        found = json.loads(file.read_text())
        if "rows" in found:
            rows: list[Row] = found["rows"]
            return rows
        if "asked" not in found or found["asked"] in reasons:
            raise RuntimeError(f"{cell}: {ended}")
        reasons[found["asked"]] = ended


def run(command: list[str], folder: Path) -> str:
    """Run a cell's process with the decisions in `folder`; how it ended, if that was an error."""
    surroundings = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": str(folder / "decisions"), "ATTN_DISPATCH_MODE": "tune"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=CELL_S)
    except subprocess.TimeoutExpired:
        return f"the process was ended after {CELL_S:g} s"
    return f"the process ended with {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""


def all_rows(only: Sequence[str], missing: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells():
            names = wanted(cell, only)
            if not names:
                continue
            for row in measured(cell, names, left_out(cell, missing, times), Path(folder)):
                rows.append(row)
                if "time" in row:
                    key = cell.name, cell.dtype, cell.backward, row["peer"]
                    times[key] = cell, row["time"]["median_ms"]
    return rows


def tables(found: Any) -> Iterator[Table]:
    about = {row["peer"]: row["about"] for row in found["rows"]}
    yield Table(
        ("peer", "version", "what is called"),
        [(name, found["versions"][name], what) for name, what in about.items()],
        f"Batch 1, heads of {found['head_dim']}. Peers of a cell are timed in the same rounds, in a process of "
        "its own. The ratio is the median over rounds, with its interval; with fewer than 6 rounds its range. "
        "Errors of out are against float64; marked own: of a peer that computes another function, relative to "
        "its own result there. Memory is beyond the inputs; masks are made before. The first call includes "
        f"compilation; `attend()` had been profiled. A peer over {HOPELESS:g} times slower than the fastest is "
        "timed once. NATTEN, torchscale and dilated-attention-pytorch are made for GPUs: nothing follows about "
        "these.",
    )
    for name in dict.fromkeys(row["name"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["name"] == name]
        notes = [
            f"{peer} {what}." for peer, what in dict.fromkeys((row["peer"], row["differs"]) for row in rows) if what
        ]
        without = {row["peer"]: row["reason"].rstrip(".") for row in reversed(rows) if "time" not in row}
        notes += [f"Left out of some cells: {peer} ({reason})." for peer, reason in without.items()]
        head = ("tokens", "dtype", "pass", "peer", "time", "time / attend()'s", "error", "memory", "first call")
        about_it = " ".join((f"`{rows[-1]['pattern']}`, {rows[0]['heads']} heads.", *notes))
        yield Table(head, [_cells(row) for row in rows if "time" in row], about_it, name)


def _cells(row: Row) -> tuple[str, ...]:
    time, over = row["time"], row.get("over_attend")
    peer = f"attend(): `{row['choice']}`" if "choice" in row else row["peer"]
    ratio = "-" if over is None else interval(over) if time["rounds"] > 1 else f"{over['median']:.2f}, 1 round"
    error = f"{row['error']:.1e}{', own' * bool(row['differs'])}" + "".join(f"; WRONG: {each}" for each in row["wrong"])
    memory = "unknown" if row["peak_bytes"] is None else gib(row["peak_bytes"])
    took, first = (milliseconds(each) for each in (time["median_ms"], row["first_ms"]))
    return (f"{row['tokens']:,}", row["dtype"], direction(row), peer, took, ratio, error, memory, first)


def main() -> None:
    options = parser(__doc__, "peers.json")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    about = "rows whose titles contain all of these; 'forward:' is without backward"
    options.add_argument("--only", nargs="+", default=[], metavar="WORD", help=about)
    given = options.parse_args()
    calm, versions = is_calm(), {peer.name: installed(peer.distribution) or "not installed" for peer in PEERS}
    rows = all_rows(given.only, {name: each for name, each in versions.items() if each == "not installed"})
    if not rows:
        example = Cell("dense causal", 1024, "float32", backward=False).title("F.sdpa")
        raise SystemExit(f"no row's title contains all of {', '.join(map(repr, given.only))}; one is {example!r}")
    figures = {"head_dim": HEAD_DIM, "limit_s": LIMIT_S, "calm_before": calm, "versions": versions, "rows": rows}
    write(given.output, figures, tables, whole=not given.only)


if __name__ == "__main__":
    main()
