"""`python -m tools.checks mutation`: where mutants lie and what they change; a copy is mutated, not the checkout."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.distributions import skip_without
from tools.checks import mutation
from tools.lib import mutants
from tools.lib.mutants import Mutant

SOURCE = dedent("""
    def area(width: int | None, height: int) -> int | None:
        if (
            width is None
        ):
            raise ValueError(
                height + 1,
            )
        found = width
        found *= height
        print(found)
        return found
""").lstrip()


@pytest.fixture
def changed(tmp_path: Path) -> dict[str, str]:
    """The source after each mutant, by the mutant's name."""
    skip_without("cosmic-ray")
    (tmp_path / "area.py").write_text(SOURCE)
    every = [each for place in mutants.mutants(tmp_path, ["area.py"]) for each in place]
    return {each.name: mutants.mutated(SOURCE, each) for each in every}


def test_each_mutant_is_another_program(changed: dict[str, str]) -> None:
    original = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(text)) != original for text in changed.values())


def test_annotations_stay(changed: dict[str, str]) -> None:
    assert {text.splitlines()[0] for text in changed.values()} == {SOURCE.splitlines()[0]}


def test_a_statement_on_many_lines_is_one(changed: dict[str, str]) -> None:
    heads = {(name.split(":")[2].split("_")[0], name.split(":")[1]) for name in changed}
    assert {("ReplaceBinaryOperator", "5"), ("DropStatement", "5"), ("ReplaceComparisonOperator", "2")} <= heads


def test_statements_and_returns(changed: dict[str, str]) -> None:
    dropped = [text for name, text in changed.items() if "DropStatement" in name]
    assert ["found *= height" in text for text in dropped].count(False) == 1
    assert ["print(found)" in text for text in dropped].count(False) == 1
    assert ["raise ValueError" in text for text in dropped].count(False) == 1
    assert len(dropped) == 3
    assert [text.endswith("return None\n") for name, text in changed.items() if "ReturnNone" in name] == [True]


def test_the_seed_decides_the_sample() -> None:
    places = [
        [Mutant("a.py", "AddNot", number, (1, 1)), Mutant("a.py", "Other", number, (1, 1))] for number in range(40)
    ]
    first, again, other = (mutants.sample(places, 10, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len({each.occurrence for each in first}) == 10
    assert len(mutants.sample(places, 100, 0)) == 40


@pytest.mark.skipif(
    not (mutation.ROOT / ".git").exists(), reason="this is no checkout of git: nothing says what to copy"
)
def test_a_copy_has_what_git_does_not_ignore() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "attn_dispatch"], cwd=mutation.ROOT, text=True).splitlines()
    with mutation.copied() as copy:
        assert [name for name in tracked if (mutation.ROOT / name).exists() and not (copy / name).exists()] == []
        assert (copy / "attn_dispatch" / "backends").is_symlink()
        assert not (copy / ".venv").exists()
    assert not copy.exists()
