"""Mutation testing: how many small faults, put into a room one at a time, its own tests find.

    python -m tools.checks mutation spec store --sample 100 --seed 0
    python -m tools.checks mutation --only attn_dispatch/spec/reach.py:71:AddNot:3      these again

cosmic-ray makes the mutants (pip install -e '.[mutation]'), in a copy of this checkout in build/: nothing here changes.
One run of the room's tests under coverage says which of them run which line; a mutant meets those that run its line,
the shortest first, and those that start processes, until one fails. A line that no test runs in the tests' own process
meets all that run its file.
Printed: each mutant with its name, how it ended and after which time, the test that failed, or its diff if it survived;
the share that was found. Survivors that no test can find, such as a cache left out, are part of every share.

A mutant runs what nobody wrote, and may write or delete outside of the copy: run this where nothing can be lost.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tools.lib.mutants import OUTPUT, Mutant, mutants, mutated, sample

TAKES = "10 min a room for 100 mutants; tuning 40"
ROOT = Path(__file__).parents[2]
PACKAGE = "attn_dispatch"
ROOMS = ("spec", "store", "tuning")
LIMIT_S = 20  #: of a mutant, beside three times what its tests took under coverage


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout, with what git does not track and does not ignore, deleted at the end."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutation-", dir=ROOT / "build") as folder:
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():  # a deleted file is listed
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield Path(folder)


class Room:
    """A room of the copy, with the process that runs its tests."""

    def __init__(self, copy: Path, name: str) -> None:
        self.copy, self.log = copy, f"{name}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.lib.mutants", f"{PACKAGE}/{name}", f"tests/{name}"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(copy / self.log).open("w", encoding="utf-8"),
            text=True,
        )
        self.measured: dict[str, Any] = self._answer()
        untraced = self._answer()
        self.measured["seconds"] |= untraced["seconds"]
        self.measured["starting"] += untraced["seconds"]
        if self.measured["status"] or untraced["status"]:
            raise SystemExit(f"tests/{name} fails without a mutant: {self._log(self.log)}")
        self.check("where it runs as with one")

    def check(self, when: str) -> None:
        """Raise SystemExit where a test fails without a mutant: what is found with one would mean nothing."""
        if self._outcome(list(self.measured["seconds"])) != "survived":
            raise SystemExit(f"{self.log}: a test fails without a mutant, {when}: {self._log(OUTPUT)}")

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that run a line of its statement, the shortest first, else all that run its file; and then those that
        start processes, which may run any line.
        """
        lines, seconds = self.measured["lines"].get(mutant.path, {}), self.measured["seconds"]
        first, last = mutant.lines
        wanted = {str(number) for number in range(first, last + 1)}
        found = {each for number, tests in lines.items() if number in wanted for each in tests if each}
        found = found or {each for tests in lines.values() for each in tests if each}
        starting = set(self.measured["starting"]) - found
        return [each for group in (found, starting) for each in sorted(group, key=lambda each: (seconds[each], each))]

    def ended(self, mutant: Mutant, number: int) -> str:
        """ "killed", "survived" or "timeout"."""
        path, tests = self.copy / mutant.path, self.tests(mutant)
        if not tests:
            return "survived"
        source = path.read_text(encoding="utf-8")
        # Each text its own time: Python knows by time and size whether a compiled file is that of this text.
        _write(path, mutated(source, mutant), 2 * number)
        answer = self._outcome(tests)
        _write(path, source, 2 * number + 1)
        return answer

    def _outcome(self, tests: Sequence[str]) -> str:
        limit_s = LIMIT_S + 3 * sum(self.measured["seconds"][each] for each in tests)
        requests = _there(self.process.stdin)
        requests.write(json.dumps({"tests": tests, "limit_s": limit_s}) + "\n")
        requests.flush()
        return str(self._answer())

    def failed(self) -> str:
        """The test that failed last, or the file that could not be imported; "" where pytest named none."""
        named = re.findall(r"^(?:FAILED|ERROR) (\S+)", (self.copy / OUTPUT).read_text(errors="replace"), re.MULTILINE)
        return named[-1] if named else ""

    def close(self) -> None:
        _there(self.process.stdin).close()  # the process ends where its input does
        self.process.wait()

    def _answer(self) -> Any:
        line = _there(self.process.stdout).readline()
        if not line:
            raise SystemExit(f"the process that runs tests ended: {self._log(self.log)}")
        return json.loads(line)

    def _log(self, name: str) -> str:
        return (self.copy / name).read_text(encoding="utf-8")[-2000:]


def _there(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("the process was started without its pipes")
    return stream


def _write(path: Path, text: str, time_s: int) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, (time_s, time_s))


def difference(copy: Path, mutant: Mutant) -> str:
    source = (copy / mutant.path).read_text(encoding="utf-8")
    old, new = source.splitlines(), mutated(source, mutant).splitlines()
    return "\n".join(list(difflib.unified_diff(old, new, lineterm="", n=2))[2:])


def run(copy: Path, name: str, chosen: Sequence[Mutant]) -> None:
    """Run each mutant of a room, print how it ended, with the change if it survived, and the score."""
    room, found = Room(copy, name), Counter[str]()
    for number, mutant in enumerate(chosen, start=1):
        begun = time.monotonic()
        outcome = room.ended(mutant, number)
        by = f"  {room.failed()}" if outcome == "killed" else ""
        print(f"{outcome:8} {time.monotonic() - begun:6.1f} s  {mutant.name}{by}", flush=True)
        if outcome == "survived":
            print(difference(copy, mutant), flush=True)
        found[outcome] += 1
    room.check("after the last one, which or another has changed something outside of the copy")
    room.close()
    caught = found["killed"] + found["timeout"]
    print(f"{name}: {caught} of {found.total()} found, {found['timeout']} of them by the time limit\n", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all by default")
    options.add_argument("--sample", type=int, default=100, help="mutants of each room; default %(default)s")
    options.add_argument("--seed", type=int, default=0, help="of the sample; default %(default)s")
    options.add_argument("--only", nargs="+", metavar="NAME", help="mutants of any sample, as a run prints them")
    given = options.parse_args()
    unknown = [each for each in given.rooms if each not in ROOMS]
    if unknown:
        options.error(f"argument ROOM: {unknown[0]!r} is none of {', '.join(ROOMS)}")
    with copied() as copy:
        for name in given.rooms or ROOMS:
            paths = sorted(str(each.relative_to(copy)) for each in (copy / PACKAGE / name).glob("*.py"))
            places = mutants(copy, paths)
            named = [each for place in places for each in place if given.only and each.name in given.only]
            chosen = named if given.only else sample(places, given.sample, given.seed)
            if chosen:
                run(copy, name, chosen)


if __name__ == "__main__":
    main()
