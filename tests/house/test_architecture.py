"""Who may import whom, and what stays unloaded until it is needed."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

import attn_dispatch
from tests.support.processes import printed

ROOT = Path(attn_dispatch.__file__).parent

#: At the top of the package: open to every room; and the functions that users call.
BASE = {"errors", "log", "private", "process_state", "settings", "system", "text"}
API = {"blocks", "dispatch", "profiling", "recording", "warming"}
#: What a room imports, the base modules apart. A room may import what these import, too. The entry modules are
#: `__init__` and `__main__`.
ARROWS = {
    "spec": (),
    "machine": (),
    "store": ("spec",),
    "kernels": ("spec", "machine"),
    "backends": ("kernels",),
    "tuning": ("kernels", "machine", "store"),
    "learning": ("tuning",),
    "decisions": ("learning",),
    "ring": ("decisions",),
    "calls": ("ring",),
    "api": ("calls",),
    "cli": ("api",),
    "compat": ("api",),
    "nn": ("api",),
    "entry": ("cli", "compat", "nn"),
    "testing": ("api",),
    "integrations": ("compat",),
}
#: Of the rooms inside a room, "" are its own files.
INNER: dict[str, dict[str, tuple[str, ...]]] = {
    "decisions": {"": (), "graphs": ("",)},
    "kernels": {"": (), **dict.fromkeys(("branches", "tiles", "triton", "native", "flex"), ("",))},
    "ring": {"rows": (), "engine": ("rows",), "": ("rows", "engine"), "plan": ("rows", "engine")},
    "cli": {"": (), "report": ("",), "commands": ("", "report")},
}
MOST_FILES = 13  #: of a room: one with more is about more than one thing; backends are alike, and may be any number
#: Lines that a room may have, C++ and the report's page included. It is raised with a capability alone; whoever adds
#: lines for anything else takes others away.
LINES = {
    "api": 1098,
    "backends": 2045,
    "base": 580,  # saved-tensor hooks, which checkpoints set, took 13
    "calls": 1299,  # checkpoints that keep packed documents and dropout, windows aligned above, took 80; their node 61
    "cli": 3048,
    "compat": 826,  # NATTEN's functions, a cache's and all masks of xFormers took 270, callers' words 38
    "decisions": 2466,  # batch invariance took 145; a seed among results, and what saved-tensor hooks alone see, 24
    "entry": 124,
    "integrations": 1999,  # masks read without all pairs took 350; which layers ask 185; packed rows in a graph 23
    "kernels": 11815,  # products by AMX took 240, dropout 287, one order of sums 355, capped scores with biases 8
    "learning": 978,
    "machine": 1141,
    "nn": 1582,
    "profiles": 5,
    "ring": 3990,  # checkpoints that keep attention took 30
    "spec": 2955,
    "store": 1486,
    "testing": 925,
    "tuning": 4113,  # the check of bits took 273
}
BESIDE = {"tests": 41_389, "tools": 7_072}  #: the same for the folders beside the package
PACKAGE = 42_470  #: lines of all rooms together; batch invariance took 820, dropout 320, checkpoints that keep it 157
COUNTED = {".py", ".h", ".cpp", ".css", ".js"}
TORCH_FREE = (
    "errors",
    "log",
    "process_state",
    "settings",
    "system",
    "text",
    "cli",
    "decisions.explanation",
    "learning.features",
    "learning.speedups",
    "learning.kriging",
    "learning.predict",
    "learning.regret",
    "learning.thresholds",
    "machine.hardware",
    "machine.memory",
    "spec.checks",
    "spec.groups",
    "spec.orders",
    "spec.pattern",
    "spec.reach",
    "store.decision",
    "store.files",
    "store.folder",
    "store.quarantine",
    "tuning.choice",
    "tuning.clocks",
    "tuning.guard",
    "tuning.intervals",
    "tuning.rounds",
)


def modules() -> dict[str, Path]:
    """Dotted names under attn_dispatch, with their files."""
    found = {}
    for path in sorted(files(ROOT)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def files(folder: Path, suffixes: Container[str] = (".py",)) -> Iterator[Path]:
    """Through links to folders too, which a recursive glob does not follow in every version of Python."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from files(path, suffixes)
        elif path.suffix in suffixes:
            yield path


MODULES = modules()


@cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """All of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


@cache
def imports(name: str) -> set[str]:
    """The modules under attn_dispatch that one imports, at its top, in functions and for type checkers."""
    found: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {module_of(name) for name in names if name.split(".")[0] == "attn_dispatch"}
    return found


def module_of(dotted: str) -> str:
    """attn_dispatch.store.folder.Store -> store; attn_dispatch.attend -> __init__."""
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


def room(name: str) -> str:
    first = name.split(".")[0]
    return "base" if first in BASE else "api" if first in API else first if first in ARROWS else "entry"


def inner(name: str) -> str:
    """The room inside a room: ring.rows.layout -> rows; that of ring.rows itself, its `__init__`, too."""
    parts = name.split(".")[1:]
    return parts[0] if parts and parts[0] in INNER.get(room(name), ()) else ""


def reachable(start: str) -> set[str]:
    found = set(ARROWS[start])
    return found.union(*map(reachable, found))


def allowed(importer: str, imported: str) -> bool:
    here, there = room(importer), room(imported)
    if here == there and here in INNER:
        return inner(importer) == inner(imported) or inner(imported) in INNER[here][inner(importer)]
    return there == here or there == "base" or (here != "base" and there in reachable(here))


def test_the_files_are_found() -> None:
    assert {"store.folder", "backends.sdpa", "cli", "ring.rows.layout", "__init__"} <= MODULES.keys()
    own = {"decisions.call", "errors", "kernels.autograd", "log", "settings"}
    own |= {"kernels.device_cache", "process_state", "spec.problem", "store.decision", "text"}
    assert imports("recording") == own


def test_imports_follow_the_arrows() -> None:
    assert [(name, each) for name in MODULES for each in sorted(imports(name)) if not allowed(name, each)] == []


def test_no_circle_of_files() -> None:
    graph = {name: imports(name) - {"__init__"} for name in MODULES}
    while graph:
        done = {name for name, needs in graph.items() if not needs & graph.keys() - {name}}
        assert done, sorted(graph)
        graph = {name: needs for name, needs in graph.items() if name not in done}


def test_backends_stand_alone() -> None:
    own = [name for name in MODULES if name.startswith("backends.")]
    others = ("backends", "kernels.registry")
    assert [(name, each) for name in own for each in imports(name) if each.startswith(others)] == []


def test_wheels_hold_every_room() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    rooms = {path.parent for path in MODULES.values() if path.name == "__init__.py"}
    names = {".".join(("attn_dispatch", *folder.relative_to(ROOT).parts)) for folder in rooms}
    assert names == set(project["tool"]["setuptools"]["packages"])


def test_rooms_say_what_they_are_for() -> None:
    rooms = [path for path in MODULES.values() if path.name == "__init__.py" and path.parent != ROOT]
    assert len(rooms) > len(ARROWS)
    for path in rooms:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree)
        assert text, path
        assert path.parent.name == "cli" or len(text.splitlines()) == 4, path
        # In "cli" the command itself stands, and users import from the others.
        if path.parent.name not in ("cli", "compat", "nn", "testing"):
            assert len(tree.body) == 1, f"{path} holds more than its docstring"


def test_rooms_are_small() -> None:
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > MOST_FILES and folder.name != "backends"} == {}


def lines_in(folder: Path) -> Counter[str]:
    """Lines of the files in a folder, by the first part of their path in it."""
    counts: Counter[str] = Counter()
    for path in files(folder, COUNTED):
        first = path.relative_to(folder).parts[0].removesuffix(".py")
        counts[first] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def test_rooms_keep_to_their_lines() -> None:
    counts: Counter[str] = Counter()
    for name, lines in lines_in(ROOT).items():
        counts[name if name == "profiles" else room(name)] += lines
    for name in BESIDE:
        counts[name] = lines_in(ROOT.parent / name).total()
    assert counts.keys() == LINES.keys() | BESIDE.keys()
    assert {name: n for name, n in counts.items() if n > (LINES | BESIDE)[name]} == {}
    assert sum(counts[name] for name in LINES) <= PACKAGE


# --- calls go down only -----------------------------------------------------------------------------------------------

MOST_ARGUMENTS = 12  #: of a function, but kernels, attend, a race's settings, and those of another library's signature
MANY_ARGUMENTS = {
    "attend", "flash_attn_varlen_func", "flash_attn_with_kvcache", "fkodom.__init__", "sampled_in_rounds"
}  # fmt: skip
MOST_PATHS = 12  #: McCabe's complexity of attend: what a hit goes through
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)


def written_modules(name: str) -> Iterator[str]:
    """The attributes of other modules of the package that a module assigns to: hooks, which no import shows."""
    imported = {module.rpartition(".")[2] for module in imports(name)}
    aliases = [x for node in nodes(name) if isinstance(node, ast.ImportFrom | ast.Import) for x in node.names]
    imported = {x.asname or x.name for x in aliases if x.name.rpartition(".")[2] in imported}
    for node in nodes(name):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [ast.unparse(node)] if ast.unparse(node.value) in imported else []


def test_calls_go_down_only() -> None:
    """No module writes into another one, and none is handed attend(), which stands above it."""
    assert [(name, each) for name in MODULES for each in written_modules(name)] == []
    for node in (node for name in MODULES for node in nodes(name) if isinstance(node, ast.Call)):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        assert "attend" not in [each.id for each in given if isinstance(each, ast.Name)], ast.unparse(node)


def test_functions_take_few_arguments() -> None:
    many = set()
    for name in MODULES:
        for node in nodes(name):
            if isinstance(node, ast.FunctionDef) and not name.startswith("kernels.triton"):
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                title = f"{name.rpartition('.')[2]}.{node.name}" if node.name == "__init__" else node.name
                many |= {title} if count > MOST_ARGUMENTS else set()
    assert many == MANY_ARGUMENTS


def test_a_hit_has_few_paths() -> None:
    (found,) = [x for x in nodes("dispatch") if isinstance(x, ast.FunctionDef) and x.name == "attend"]
    assert 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(found)) <= MOST_PATHS


# --- what is loaded ---------------------------------------------------------------------------------------------------


STEPS = {
    "package": "import attn_dispatch",
    "torch": "import torch",
    "attend": "from attn_dispatch import attend",
    "machine": "from attn_dispatch.machine import hardware, memory",
    "asked": "hardware.silicon('cpu'); memory.available_bytes('cpu'); hardware.provenance('cpu')",
    "trial": "x = torch.ones(1, 16, 1, 8, requires_grad=True)\nattend(x, x, x).sum().backward()",
    "nn": "attn_dispatch.nn.torchscale, attn_dispatch.nn.fkodom",
}


@cache
def loaded() -> dict[str, set[str]]:
    """The modules that a new process has loaded after each step."""
    code = "import sys\n" + "".join(f"{step}\nprint(*sys.modules)\n" for step in STEPS.values())
    return dict(zip(STEPS, (set(line.split()) for line in printed("-c", code).splitlines())))


def test_no_torch_at_import() -> None:
    """In one process: the first one that loads it is named."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n"
    code += "    importlib.import_module(f'attn_dispatch.{name}')\n    assert 'torch' not in sys.modules, name"
    printed("-c", code, *TORCH_FREE)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil is what knows")
def test_what_every_process_asks_needs_no_psutil() -> None:
    """It takes longer to load than a decision to be read and taken."""
    assert not {"psutil", "pynvml"} & (loaded()["asked"] - loaded()["machine"])


def test_a_trial_does_not_load_the_compiler() -> None:
    """Nor symbolic mathematics: each takes longer to load than a small problem's trial."""
    assert "attn_dispatch.tuning.tuner" in loaded()["trial"]
    assert not loaded()["trial"] & {"torch._dynamo", "sympy"}


def test_the_package_alone_loads_nothing() -> None:
    """And modules of nn need no import of their own."""
    found = loaded()["package"]
    assert {name for name in found if name.startswith("attn_dispatch.")} == set()
    assert not found & {"torch", "msgspec", "rich", "numpy"}
    assert {"attn_dispatch.nn.torchscale", "attn_dispatch.nn.fkodom"} <= loaded()["nn"]


def test_attend_loads_no_more_than_it_needs() -> None:
    found = loaded()["attend"]
    assert "attn_dispatch.dispatch" in found
    assert not (found - loaded()["torch"]) & {
        "xformers",
        "flash_attn",
        "triton",
        "rich",
        "torch._dynamo",
        "pynvml",
        "matplotlib",
    }
    assert not found & {"xformers", "flash_attn", "rich", "torch._dynamo"}
