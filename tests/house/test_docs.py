"""README.md and docs/: what is generated is current, links lead somewhere, code runs, tables name what there is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import pytest

from attn_dispatch import Sharded, attend, errors, settings
from attn_dispatch.cli import COMMANDS, main, options
from attn_dispatch.kernels import registry
from attn_dispatch.machine.environment import VARIABLES
from attn_dispatch.spec.orders import EXCHANGES
from attn_dispatch.spec.problem import PATTERNS
from tests.house import test_architecture as house
from tests.support import ring_ranks
from tools.docs import build
from tools.docs.variables import MEANING

ROOT = build.ROOT
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in build.pages()}
OVER_RANKS = "docs/many-devices.md"
#: Commands that are not parsed, by their first words, and why.
NOT_PARSED = {"python3 -m venv": "installs packages; `.ci/run` runs the second one as it stands"}


class Block(NamedTuple):
    """A fenced block, and the number of the line that opens it."""

    kind: str
    line: int
    text: str


def blocks(page: str) -> list[Block]:
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return [Block(each[1], PAGES[page].count("\n", 0, each.start()) + 1, each[2]) for each in found]


# --- generated --------------------------------------------------------------------------------------------------------


def test_generated_parts_are_current() -> None:
    assert build.stale(build.made()) == [], "run `python -m tools.docs.build`"


def test_every_block_is_on_one_page() -> None:
    assert sorted(name for text in PAGES.values() for name in build.names(text)) == sorted(build.BLOCKS)
    markers = [name for text in PAGES.values() for name in re.findall(r"<!-- /?([\w-]+)", text)]
    assert len(markers) == 2 * len(build.BLOCKS)


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[str, str]]:
    for page, text in PAGES.items():
        yield from ((page, target) for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target)


@pytest.mark.parametrize(("page", "target"), sorted(set(links())))
def test_links_lead_somewhere(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    there = (ROOT / page).parent / path if path else ROOT / page
    assert there.exists()
    assert not anchor or anchor in anchors(str(there.resolve().relative_to(ROOT)))


def test_every_page_is_linked_from_the_readme() -> None:
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        found = {(page, target.partition("#")[0]) for page, target in links() if page in new}
        there = {str(((ROOT / page).parent / path).resolve().relative_to(ROOT)) for page, path in found if path}
        new = {page for page in there if page in PAGES} - reached
    assert reached == PAGES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:attn_dispatch|backends|docs|examples|tests|tools)/[\w./]*)`", PAGES[page])
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
    modules = re.findall(r"python -m ((?:tools|attn_dispatch)[\w.]*)", PAGES[page])
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


# --- code -------------------------------------------------------------------------------------------------------------


def python(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind == "python"]


def run(page: str) -> None:
    """All Python of a page, from top to bottom, in a namespace of its own."""
    namespace: dict[str, Any] = {"__name__": page}
    for block in python(page):
        # With as many lines before it as on the page, so that tracebacks name the page's own.
        exec(compile("\n" * block.line + block.text, page, "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if page != OVER_RANKS and python(page)])
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "predict")  # only where a page profiles, it measures
    run(page)


@pytest.mark.usefixtures("_processes")
def test_python_runs_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes, as under torchrun."""
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "predict")
    assert python(OVER_RANKS)
    ring_ranks.ranks_of(2).everywhere(run, OVER_RANKS)


def test_calls_within_text_have_the_arguments_of_attend() -> None:
    calls = re.findall(r"`(attend\(q, k, v\b[^`]*\))`", "".join(PAGES.values()))
    assert len(calls) >= 5
    names = {"attend": inspect.signature(attend).bind, **dict.fromkeys("qkv"), **PATTERNS}
    for call in calls:
        assert eval(call, names).arguments.keys() >= {"q", "k", "v"}


def commands() -> Iterator[tuple[str, str]]:
    """Every command line, and those of the examples in `--help`."""
    for page in PAGES:
        for block in blocks(page):
            if block.kind in ("sh", "bash"):
                yield from ((page, line) for line in block.text.splitlines())
            elif page == "docs/commands.md":
                yield from (
                    (page, line) for line in re.findall(r"^  ((?:attn-dispatch|torchrun) .*)$", block.text, re.M)
                )


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_commands_are_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are parsed, not run."""
    if line.startswith(tuple(NOT_PARSED)):
        return
    understood = []

    def noted(args: Namespace) -> int:
        if hasattr(args, "lengths") and options.has_length(args):
            assert options.problems_of(args)
        understood.append(args)
        return 0

    for name in COMMANDS:
        module = importlib.import_module(f"attn_dispatch.cli.commands.{name.replace('import', 'import_')}")
        monkeypatch.setattr(module, "run", noted)
    words = shlex.split(line.partition(" | ")[0], comments=True)
    if words[0] == "torchrun":
        words = [word for word in words[1:] if word != "--standalone" and not word.startswith("--nproc_per_node=")]
        if words[0] != "-m":
            assert (ROOT / words[0]).exists()
            return
        assert words[:2] == ["-m", "attn_dispatch"]
        words = words[1:]
    assert words[0] in ("attn-dispatch", "attn_dispatch")
    assert main(words[1:]) == 0
    assert len(understood) == 1


def test_every_fenced_block_is_of_a_kind_that_is_checked() -> None:
    kinds = {block.kind for page in PAGES for block in blocks(page)}
    assert kinds == {"python", "sh", "bash", "text"}
    assert all(text.count("\n```") == 2 * len(blocks(page)) for page, text in PAGES.items())


# --- length -----------------------------------------------------------------------------------------------------------


def words(text: str) -> int:
    """Without the bars and rules of tables."""
    return sum(any(map(str.isalnum, each)) for each in text.split())


def test_the_documentation_is_short() -> None:
    """One that grows takes as much away."""
    assert sum(words(text) for page, text in PAGES.items() if page.startswith("docs/")) <= 25_000


@pytest.mark.parametrize("page", PAGES)
def test_cells_of_tables_are_short(page: str) -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGES[page].splitlines() if line.startswith("| ")]
    assert [cell for row in rows for cell in row if words(cell) > 40] == []


# --- tables -----------------------------------------------------------------------------------------------------------


def first_column(page: str, head: str) -> list[str]:
    """Names in the first cells of the table whose first row begins so."""
    lines = PAGES[page].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows += re.findall(r"`([\w.]+)`", line.split("|")[1])
    return rows


def test_every_environment_variable_is_described() -> None:
    """Those that are read by name, in any file of the package."""
    read: set[str] = set(VARIABLES)
    for path in house.MODULES.values():
        text = path.read_text(encoding="utf-8")
        for form in (
            r'"(ATTN_DISPATCH_[A-Z_]+)"',
            r'os\.environ(?:\.get\(|\[)"(\w+)"',
            r'"(\w+)" (?:not )?in os\.environ',
        ):
            read |= set(re.findall(form, text))
    assert {"CXX", "WORLD_SIZE", "ATTN_DISPATCH_OVERHEAD"} <= read
    assert read == MEANING.keys()


def test_tables_name_all_there_is() -> None:
    assert first_column("docs/how-it-decides.md", "mode") == list(settings.MODES)
    assert set(first_column("docs/backends.md", "backend")) == {*registry.BUILT_IN, registry.LAST_RESORT}
    assert first_column("docs/many-devices.md", "exchange") == list(EXCHANGES)
    assert first_column("docs/many-devices.md", "`Sharded` argument") == [each.name for each in fields(Sharded)][1:]
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"AttnDispatchError"}
    assert {name for name in first_column("docs/guide.md", "error") if name != "ValueError"} == raised


def test_the_arrows_are_those_that_are_checked() -> None:
    text = PAGES["docs/house.md"].partition("## Arrows")[2]
    drawn = dict(re.findall(r"^(\w+) ->(.*)$", text, flags=re.MULTILINE))
    assert {room: tuple(to.replace(",", "").split()) for room, to in drawn.items()} == house.ARROWS
    assert f"({house.MOST_FILES})" in PAGES["docs/house.md"]
