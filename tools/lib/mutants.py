"""Mutants of a package, made by cosmic-ray, and the process that runs tests on one after another.

`python -m tools.lib.mutants FOLDER TESTS` is that process; its working folder is a copy of the checkout. It runs TESTS
once and answers which of them run which lines of FOLDER. Then it loads torch and pytest and forks for each mutant, so
that a mutant costs its tests and not these imports: it reads a line of JSON for each, `{"tests": [], "limit_s": 20}`,
and answers with one. The program is `tools.checks.mutation`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.02
OUTPUT = "pytest.log"  #: what the tests of the last mutant printed
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")  #: Python's audit events
UNTRACED = "test_guard*.py"  #: files of tests that end endless loops by an exception: under a tracer it never comes
MOST_MEMORY = 16 * 2**30  #: bytes of address space; a mutant may ask for any number


class Mutant(NamedTuple):
    """One change of one place: the `occurrence`-th of those where `operator` can change the file."""

    path: str  #: relative to the checkout
    operator: str
    occurrence: int
    lines: tuple[int, int]  #: first and last of the innermost statement, or of its head where it has a body

    @property
    def name(self) -> str:
        return f"{self.path}:{self.lines[0]}:{self.operator}:{self.occurrence}"


# --- what is changed --------------------------------------------------------------------------------------------------


class DropStatement:
    """A call, an augmented assignment, `raise`, `del` or `assert` becomes `pass`: cosmic-ray has no such operator."""

    KINDS = ("atom_expr", "power", "raise_stmt", "del_stmt", "assert_stmt")

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type != "simple_stmt":
            return
        first = node.children[0]
        augmented = first.type == "expr_stmt" and getattr(first.children[1], "value", "=") not in "=:"
        if first.type in self.KINDS or augmented:
            yield first.start_pos, first.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = _keyword("pass", node.children[0])
        return node


class ReturnNone:
    """`return VALUE` becomes `return None`: cosmic-ray has no such operator."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "return_stmt" and node.children[1].get_code().strip() != "None":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1] = _keyword("None", node.children[1])
        return node


def _keyword(word: str, old: Any) -> Any:
    tree = importlib.import_module("parso.python.tree")
    return tree.Keyword(word, old.start_pos, prefix=old.get_first_leaf().prefix)


def operators() -> dict[str, Any]:
    """Those of cosmic-ray that take no arguments, and two of our own.

    Comparisons by `is` are left out: of small numbers and None they are those by `==`.
    """
    plugins = importlib.import_module("cosmic_ray.plugins")
    names = [name for name in plugins.operator_names() if name.split("_")[-1] not in ("Is", "IsNot")]
    names += [f"core/ReplaceComparisonOperator_{each}" for each in ("Is_IsNot", "IsNot_Is")]
    found = {name: plugins.get_operator(name) for name in names}
    made = {name.removeprefix("core/"): each() for name, each in found.items() if not each.arguments()}
    return {**made, "DropStatement": DropStatement(), "ReturnNone": ReturnNone()}


def mutants(root: Path, paths: Sequence[str]) -> list[list[Mutant]]:
    """All mutants of these files, those of one place and kind of operator together."""
    cosmic, every = importlib.import_module("cosmic_ray.ast"), operators()
    places: dict[tuple[Any, ...], list[Mutant]] = {}
    for path in paths:
        source = (root / path).read_text(encoding="utf-8")
        nodes, statements = list(cosmic.ast_nodes(cosmic.get_ast(source))), _Statements(source)
        for name, operator in every.items():
            positions = (each for node in nodes for each in operator.mutation_positions(node))
            for occurrence, (start, end) in enumerate(positions):
                if not statements.in_annotation(start):
                    # "ReplaceBinaryOperator_Add_Mul" and "..._Add_Sub" are one kind: what replaces it is drawn.
                    place = (path, start, end, "_".join(name.split("_")[:2]))
                    found = Mutant(path, name, occurrence, statements.around(start[0]))
                    places.setdefault(place, []).append(found)
    return list(places.values())


def sample(places: Sequence[Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """`count` of these places, drawn by `seed`, and of each one mutant."""
    drawn = random.Random(seed)
    return sorted(drawn.choice(each) for each in drawn.sample(list(places), min(count, len(places))))


def mutated(source: str, mutant: Mutant) -> str:
    found = importlib.import_module("cosmic_ray.mutating").mutate_code(
        source, operators()[mutant.operator], mutant.occurrence
    )
    return str(found)


class _Statements:
    """Where the statements and annotations of a module lie."""

    def __init__(self, source: str) -> None:
        nodes = list(ast.walk(ast.parse(source)))
        self.heads = [(node.lineno, _end_of_head(node)) for node in nodes if isinstance(node, ast.stmt)]
        annotations = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
        self.annotations = [
            ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0))
            for each in annotations
            if isinstance(each, ast.expr)
        ]

    def around(self, line: int) -> tuple[int, int]:
        """First and last line of the smallest head with this line; the line itself where none has it."""
        holding = [(first, last) for first, last in self.heads if first <= line <= last]
        return min(holding, key=lambda each: each[1] - each[0], default=(line, line))

    def in_annotation(self, position: tuple[int, int]) -> bool:
        return any(start <= position < end for start, end in self.annotations)


def _end_of_head(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


# --- the process that runs tests --------------------------------------------------------------------------------------


class Recorder:
    """A plug-in of pytest: each test is a context of coverage; its time is noted, and whether it starts processes."""

    def __init__(self, measured: Any = None) -> None:
        self.measured, self.seconds, self.starting = measured, dict[str, float](), set[str]()
        self.running = ""
        sys.addaudithook(self.note)

    def note(self, event: str, _: object) -> None:
        if event in STARTS and self.running:
            self.starting.add(self.running)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid
        if self.measured is not None:
            self.measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


class Only:
    """A plug-in of pytest: these tests alone, in this order; all, where a mutant has changed their names."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.places = {name: place for place, name in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        found = [each for each in items if each.nodeid in self.places]
        if len(found) == len(self.places):
            items[:] = sorted(found, key=lambda each: self.places[each.nodeid])


def pytest_status(arguments: Sequence[str], plugin: object) -> int:
    import pytest

    return int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *arguments], plugins=[plugin]))


def measure(folder: str, tests: str) -> dict[str, Any]:
    """Run the tests of a folder once: status, seconds by test, tests by line of each file under `folder`, and tests
    that start processes, whose lines are not seen. Left out: `UNTRACED`.
    """
    measured = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, source=[folder])
    measured.start()
    recorder = Recorder(measured)
    status = pytest_status([tests, f"--ignore-glob=*/{UNTRACED}"], recorder)
    measured.stop()
    data = measured.get_data()
    lines = {str(Path(path).relative_to(Path.cwd())): data.contexts_by_lineno(path) for path in data.measured_files()}
    return {"status": status, "seconds": recorder.seconds, "lines": lines, "starting": sorted(recorder.starting)}


def measure_untraced(tests: str) -> dict[str, Any]:
    """Run what `measure` leaves out: status, and seconds by test."""
    files = sorted(map(str, Path(tests).glob(UNTRACED)))
    recorder = Recorder()
    return {"status": pytest_status(files, recorder) if files else 0, "seconds": recorder.seconds}


def limited(tests: Sequence[str], limit_s: float) -> str:
    """Run these tests in a fork: "killed" where one fails, "survived", or "timeout"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        _write_to(OUTPUT)
        files = sorted({name.split("::")[0] for name in tests})
        os._exit(pytest_status(files, Only(tests)))
    for _ in range(int(limit_s / POLL_S)):  # counted, not timed: this process may be suspended, and its child with it
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _end(child)
            return "survived" if status == 0 else "killed"
        time.sleep(POLL_S)
    _end(child)
    os.waitpid(child, 0)
    return "timeout"


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # with what the tests have started


def _write_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def main() -> None:
    folder, tests = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tests print is no answer
    for traced in (True, False):
        child = os.fork()  # so that this process imports nothing of the package
        if child == 0:
            found = measure(folder, tests) if traced else measure_untraced(tests)
            print(json.dumps(found), file=answers, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    for name in ("torch", "pytest"):
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(limited(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
