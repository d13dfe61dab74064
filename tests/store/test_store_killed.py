"""No decision is lost when writers are killed at random moments; no damaged file is believed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from attn_dispatch.store.decision import Damaged, Decision, decode, encode
from attn_dispatch.store.folder import Store
from tests.support.made_up import SILICON, decision, problem_at

WRITERS, KILLS, EACH = 2, 10, 40
CHILD = "import sys; from tests.store import test_store_killed as here; here.write(*sys.argv[1:])"


def made(writer: int, number: int) -> Decision:
    """A writer's own; each fourth is a row in one that all share."""
    batch = 1 if number % 4 == 0 else 2 + writer
    return decision(problem_at(64 * (1 + number), batch), {(f"w{writer}", "natural"): 1.0 + number})


def write(folder: str, writer: str, first: str) -> None:
    """In a process of its own: store, then report."""
    for number in range(int(first), EACH):
        assert Store(Path(folder)).put(made(int(writer), number)) is not None
        os.write(1, b"%d\n" % number)


def test_no_reported_decision_is_lost(tmp_path: Path) -> None:
    chance, kills = Random(0), 0
    reported: dict[int, list[int]] = {writer: [] for writer in range(WRITERS)}
    while any(len(each) < EACH for each in reported.values()):
        commands = [[sys.executable, "-c", CHILD, str(tmp_path), str(w), str(len(n))] for w, n in reported.items()]
        running = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in commands]
        if kills < KILLS:
            for process in running:
                assert process.stdout is not None
                reported[running.index(process)] += map(int, filter(None, [process.stdout.readline().strip()]))
            time.sleep(chance.uniform(0, 0.02))
            for process in running:
                process.send_signal(signal.SIGKILL)
            kills += 1
        for writer, process in enumerate(running):
            with process:
                rest, _ = process.communicate()
            reported[writer] += [int(line) for line in rest.splitlines() if line]
            assert process.returncode in (0, -signal.SIGKILL)
    store = Store(tmp_path)
    for writer, numbers in reported.items():
        assert numbers == list(range(EACH))
        for number in numbers:
            wanted = made(writer, number)
            found = store.get(SILICON, wanted.group, wanted.key)
            assert found is not None
            assert wanted.choice in {row.backend for row in found.candidates}


def test_no_damaged_file_is_believed() -> None:
    """Flipped bits, and parts that are cut, dropped, joined or put in."""
    chance = Random(0)
    originals = [made(0, 1), made(1, 2)]
    files = [encode(each) for each in originals]
    for _ in range(2000):
        index = chance.randrange(2)
        content, other = files[index], chance.choice(files)
        start, stop = sorted(chance.randrange(len(content)) for _ in range(2))
        flipped = bytes([content[start] ^ 1 << chance.randrange(8)])
        damaged = chance.choice(
            (
                content[:start] + flipped + content[start + 1 :],
                content[:start],
                content[:start] + content[stop + 1 :],
                content[:start] + other[stop:],
                content[:start] + chance.randbytes(20) + content[start:],
            )
        )
        try:
            assert decode(damaged) == originals[index]
        except Damaged:
            continue
