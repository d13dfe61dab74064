"""Whether the store loses or believes anything it should not: writers that are killed at any moment, files that are
changed in any way.

    python -m tools.checks.trust_store [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from attn_dispatch.store.decision import Damaged, Decision, Drift, Row, canonical, decode, encode, to_plain
from attn_dispatch.store.folder import Store

SILICON, TIME = "cpu-made-up", "2025-01-01T00:00:00.000000+00:00"
SHARED = 4  #: every SHARED-th decision is a row of one that all processes write
KILL_S = 0.03  #: mean time from one kill to the next
KILLS_EACH = 25  #: of a process, on average; later ones may finish


def figures(quick: bool = False) -> dict[str, Any]:
    """Both trials. The numbers that count are `lost`, `parse_errors`, `crashes` and `wrong_accepted`: all 0."""
    processes, each, mutations = (2, 20, 2_000) if quick else (16, 500, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_writers(Path(folder), processes, each)
    return {"killed": killed, "mutated": mutate_files(mutations)}


# --- writers that are killed ------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """A child process that stores decisions and reports each once it is stored."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    reported: list[int] = field(default_factory=list)
    rest: bytes = b""

    def start(self, folder: Path, count: int) -> None:
        given = [str(folder), str(self.number), str(len(self.reported)), str(count)]
        command = [sys.executable, __file__, "--child", *given]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def read_report(self) -> bool:
        """Read a report; returns whether more will follow."""
        assert self.process is not None
        assert self.process.stdout is not None
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + text).split(b"\n")
        self.reported += map(int, lines)
        return bool(text)


def kill_writers(folder: Path, processes: int, each: int, seed: int = 0) -> dict[str, int]:
    """Kill writers at random moments and restart them until all is written; every reported decision must exist."""
    random = Random(seed)
    writers = [Writer(number) for number in range(processes)]
    kills = _drive(folder, writers, each, random)
    store, lost, decisions = Store(folder), 0, 0
    for writer in writers:
        decisions += len(writer.reported)
        lost += sum(not _is_stored(store, made(writer.number, number)) for number in writer.reported)
    return {
        "processes": processes,
        "decisions": decisions,
        "kills": kills,
        "lost": lost,
        "parse_errors": sum(not _is_whole(path) for path in folder.rglob("*.json")),
    }


def _drive(folder: Path, writers: list[Writer], each: int, random: Random) -> int:
    kills, following = 0, time.monotonic()
    with selectors.DefaultSelector() as selector:

        def start(writer: Writer) -> None:
            writer.start(folder, each)
            assert writer.process is not None
            assert writer.process.stdout is not None
            selector.register(writer.process.stdout, selectors.EVENT_READ, writer)

        for writer in writers:
            start(writer)
        while selector.get_map():
            for key, _ in selector.select(timeout=KILL_S / 4):
                if not key.data.read_report():
                    selector.unregister(key.fileobj)
                    _end(key.data)
                    if len(key.data.reported) < each:
                        start(key.data)
            if kills < KILLS_EACH * len(writers) and time.monotonic() > following and selector.get_map():
                victim = random.choice([key.data for key in selector.get_map().values()])
                os.kill(victim.process.pid, signal.SIGKILL)
                kills += 1
                following = time.monotonic() + random.expovariate(1 / KILL_S)
    return kills


def _end(writer: Writer) -> None:
    """Reap the process. If it died, the kill must be the cause."""
    assert writer.process is not None
    with writer.process as process:
        code = process.wait()
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a writer ended with {code}")
    writer.rest = b""


def child(folder: Path, writer: int, first: int, count: int) -> None:
    """Store, then report: every reported decision must be stored."""
    for number in range(first, count):
        if Store(folder).put(made(writer, number)) is None:
            sys.exit("a decision was not kept")
        os.write(1, b"%d\n" % number)


def made(writer: int, number: int) -> Decision:
    """A decision of a writer's own, or, each fourth time, a row of its own in one that all share."""
    name = f"w{writer}-{number}"
    key = f"{number // SHARED % 8:020x}" if number % SHARED == 0 else f"{writer + 1:08x}{number:012x}"
    rows = [Row(backend=name, order="natural", status="chosen", median_ms=1.0 + number, measured=TIME)]
    more = {} if number % SHARED == 0 else {"title": "x" * (number * 97 % 3000)}
    return base(key=key, group=f"{int(key, 16) % 5:012x}", choice=name, candidates=tuple(rows), **more)


def _is_stored(store: Store, wanted: Decision) -> bool:
    found = store.get(wanted.silicon, wanted.group, wanted.key)
    return found is not None and wanted.choice in {row.backend for row in found.candidates}


def _is_whole(path: Path) -> bool:
    try:
        decode(path.read_bytes())
    except Damaged:
        return False
    return True


# --- files that are changed -------------------------------------------------------------------------------------------


def base(**changes: Any) -> Decision:
    rows = (
        Row(backend="sdpa", order="natural", status="chosen", version="2.13", median_ms=0.3, low_ms=0.2, measured=TIME),
        Row(backend="flash", order="natural", status="not_installed", reason='no "flash"', measured=TIME),
        Row(backend="manual", order="hilbert", status="slower", median_ms=9.5, ratio=31.7, peak_bytes=1 << 40),
    )
    values: dict[str, Any] = {
        "key": "0123456789abcdef0123",
        "silicon": SILICON,
        "group": "0123456789ab",
        "title": "dense Ω",
        "problem": {"batch": 1, "strides": ["bnhd"], "scale": 0.125, "pattern": {"kind": "Dense"}},
        "choice": "sdpa",
        "order": "natural",
        "source": "measured",
        "candidates": rows,
        "provenance": {"torch": "2.13"},
        "created": TIME,
    }
    return Decision(**(values | changes))


def mutate_files(count: int, seed: int = 0) -> dict[str, int]:
    """Decode changed files: each is refused by the one error there is for that, or is the same decision still."""
    random = Random(seed)
    drift = Drift(median_ms=1.0, low_ms=0.5, high_ms=2.0, samples=9, seen=TIME)
    originals = [base(), base(evidence=("a", "b")), base(drift=drift)]
    files = [encode(each) for each in originals]
    crashes = wrong = 0
    for _ in range(count):
        index = random.randrange(len(files))
        content = random.choice(MUTATIONS)(random, files[index], random.choice(files))
        try:
            wrong += decode(content) != originals[index]
        except Damaged:
            pass
        except Exception:  # noqa: BLE001 - counted
            crashes += 1
    return {"mutations": count, "crashes": crashes, "wrong_accepted": wrong}


Mutation = Callable[[Random, bytes, bytes], bytes]


def flip(random: Random, content: bytes, other: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 8])):
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def cut(random: Random, content: bytes, other: bytes) -> bytes:
    return content[: random.randrange(len(content))]


def drop(random: Random, content: bytes, other: bytes) -> bytes:
    start = random.randrange(len(content))
    return content[:start] + content[start + random.randint(1, 40) :]


def splice(random: Random, content: bytes, other: bytes) -> bytes:
    """The head of one and the tail of another, as two writers without atomic renames would leave it."""
    return content[: random.randrange(len(content))] + other[random.randrange(len(other)) :]


def noise(random: Random, content: bytes, other: bytes) -> bytes:
    start = random.randrange(len(content))
    return content[:start] + random.randbytes(random.randint(1, 64)) + content[start:]


def change(random: Random, content: bytes, other: bytes) -> bytes:
    """Another value of the same or another type somewhere inside."""
    plain = json.loads(content)
    holder, name = random.choice(list(_places(plain)))
    holder[name] = random.choice(VALUES) if random.random() < 0.7 else _near(random, holder[name])
    return _bytes(plain)


def remove(random: Random, content: bytes, other: bytes) -> bytes:
    plain = json.loads(content)
    holder, name = random.choice(list(_places(plain)))
    del holder[name]
    return _bytes(plain)


def double(random: Random, content: bytes, other: bytes) -> bytes:
    """A key twice: the later value is the one that readers of JSON take."""
    name = random.choice(list(json.loads(content)))
    value = json.dumps(random.choice(VALUES))
    return content[:-1] + f',"{name}":{value}}}'.encode()


def nest(random: Random, content: bytes, other: bytes) -> bytes:
    depth = random.choice([10, 500, 5_000])
    opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    deep = opening * depth + b"1" + closing * random.choice([0, depth])
    start = random.choice([i for i, byte in enumerate(content) if byte == ord(":")]) + 1
    return content[:start] + deep + b"," * random.randint(0, 1) + content[start:]


def number(random: Random, content: bytes, other: bytes) -> bytes:
    big = random.choice([b"1e999", b"-1e999", b"9" * 400, b"9" * 6_000, b"NaN", b"Infinity", b"1e-999", b"0x10"])
    places = [i for i, byte in enumerate(content) if chr(byte).isdigit() and content[i - 1 : i] == b":"]
    start = random.choice(places)
    end = next(i for i in range(start, len(content)) if content[i : i + 1] in b",}]")
    return content[:start] + big + content[end:]


def sign(random: Random, content: bytes, other: bytes) -> bytes:
    """Senseless values with a matching checksum."""
    plain = to_plain(decode(content))
    name, values = random.choice(list(SENSELESS.items()))
    plain[name] = random.choice(values)
    return canonical({**plain, "checksum": sha256(canonical(plain)).hexdigest()[:32]})


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a nested value."""
    for name in value if isinstance(value, dict) else range(len(value)):
        yield value, name
        if isinstance(value[name], dict | list):
            yield from _places(value[name])


def _near(random: Random, value: Any) -> Any:
    if isinstance(value, str) and value:
        start = random.randrange(len(value))
        return value[:start] + random.choice("0a.é\0") + value[start + 1 :]
    return value + random.choice([1, -1, 1e-12]) if isinstance(value, int | float) else [value]


def _bytes(plain: Any) -> bytes:
    return json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")


PATHS = ["../../../etc/passwd", "/etc/passwd", "..", "", "a/b", "0" * 19 + "\n", "\0" * 20, "%2e%2e", "Ω" * 20, 3, None]
VALUES: list[Any] = [None, True, 0, -1, 0.5, "", "chosen", [], {}, [[]], {"a": 1}, 1e308, 1 << 70, *PATHS]
SENSELESS: dict[str, list[Any]] = {
    **dict.fromkeys(("key", "silicon", "group"), PATHS),
    "schema": [0, 1, 3, -2, "2", 2.5, None],
    "choice": ["manual", "flash", "", 1, None],
    "order": ["hilbert", "", [], None],
    "candidates": [[], {}, None, [{}], [None], [[]], "rows", [{"backend": "sdpa", "order": "natural"}]],
    "problem": [None, [], 1, "dense"],
    "provenance": [None, [], {"torch": 2}, "torch"],
    "created": [None, "", "yesterday", "0001-01-01T00:00:00+23:59", 3, "2025-13-01", "9" * 100],
    "elapsed_ms": ["1", None, [], 10**400],
    "evidence": [None, [1], "all", {}],
    "drift": [{}, [], {"median_ms": 1.0}, 3],
}
MUTATIONS: tuple[Mutation, ...] = (flip, cut, drop, splice, noise, change, remove, double, nest, number, sign)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few of each")
    options.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        folder, *numbers = arguments.child
        child(Path(folder), *map(int, numbers))
    else:
        print(json.dumps(figures(arguments.quick), indent=1))


if __name__ == "__main__":
    main()
