"""How the code reads, in figures: each may fall, and none may rise."""

from __future__ import annotations

import ast
from functools import cache
from itertools import chain

from tests.house.test_architecture import MODULES, imports, nodes

LONGEST_CHAIN = 22  #: modules that import each other in a row
PATTERN_TESTS = 40  #: isinstance() of patterns: geometry belongs to the patterns and spec/reach
UNFORMATTED = 10  #: statements that ruff leaves as they are
LONG_LINES = 870  #: of more than 115 characters
PATTERNS = {"Pattern", "Dense", "Dilated", "Window", "Neighborhood", "Reordered"}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}


@cache
def longest_chain(name: str) -> tuple[str, ...]:
    """From the first module that is loaded to this one."""
    below = (longest_chain(each) for each in sorted(imports(name) - {name, "__init__"}))
    return (*max(below, key=len, default=()), name)


def asks_for_a_pattern(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"):
        return False
    named = [each for each in ast.walk(node.args[1]) if isinstance(each, ast.Name | ast.Attribute)]
    return any((each.id if isinstance(each, ast.Name) else each.attr) in PATTERNS for each in named)


def test_imports_are_few_steps_deep() -> None:
    found = max(map(longest_chain, MODULES), key=len)
    assert len(found) <= LONGEST_CHAIN, " > ".join(found)


def test_patterns_are_asked_by_methods() -> None:
    found = {name: sum(map(asks_for_a_pattern, nodes(name))) for name in MODULES}
    assert sum(found.values()) <= PATTERN_TESTS, {name: n for name, n in found.items() if n}


def test_lines_are_short_and_formatted() -> None:
    lines = list(chain.from_iterable(text.splitlines() for text in TEXTS.values()))
    assert sum(len(line) > 115 for line in lines) <= LONG_LINES
    assert sum("# fmt: skip" in line for line in lines) <= UNFORMATTED


def leaves_out(node: ast.AST) -> bool:
    """Whether a list of texts is multiplied by a condition."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List)):
        return False
    texts = [each for each in ast.walk(node.left) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return bool(texts) and not ast.unparse(node.right).startswith(("len(", "2", "3"))


def test_sentences_and_conditions_are_plain() -> None:
    """A docstring begins with what it is about, and a text that may be left out is left out by `if`."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for name in MODULES for node in nodes(name) if isinstance(node, kinds)]
    assert [text for each in found if (text := ast.get_docstring(each) or "").startswith(("Of ", "Likewise"))] == []
    assert [ast.unparse(node) for name in MODULES for node in nodes(name) if leaves_out(node)] == []


def test_numpy_is_not_needed() -> None:
    """It is not among what the package requires; Triton's interpreter alone uses it."""
    assert [name for name, text in TEXTS.items() if ".numpy()" in text or "import numpy" in text] == []
