"""Who may import whom, and what stays unloaded until it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attn_dispatch

ROOT = Path(attn_dispatch.__file__).parent

# A module may import from the lines above its own.
LAYERS = (
    ("errors", "units", "logging", "group", "environment", "pace", "intervals", "stopwatch", "entry", "files"),
    (
        "settings",
        "pattern",
        "hilbert",
        "strides",
        "racing",
        "cuda_timing",
        "memory",
        "older",
        "merge",
        "missed",
        "sealed",
        "tracing",
    ),
    ("measure", "contact"),
    ("machine", "choice", "guard", "quarantine"),
    ("order",),
    ("reorder",),
    ("problem",),
    ("contract", "fits"),
    ("limits",),
    (
        "pieces",
        "kernels",
        "native",
        "triton_kernels",
        "triton_tile_kernels",
        "visits",
        "example",
        "counts",
        "blocks",
        "poison",
    ),
    ("workers", "recorded", "triton_support", "triton_gradients", "triton_tile_gradients"),
    ("hidden",),
    ("branches", "launches"),
    ("branched", "tiles"),
    ("tile_math", "tile_estimates"),
    ("tile_lists",),
    ("backends",),
    ("registry", "verify", "bundle"),
    ("store", "hazards"),
    ("explanation", "candidates", "features", "kriging"),
    ("learned",),
    ("gains",),
    ("threshold",),
    ("admission", "stored", "sentinel", "regret"),
    ("heat", "unmeasured"),
    ("tuner",),
    ("decisions", "ring"),
    ("dispatch",),
    ("recording",),
    ("profiling",),
    ("sharing",),
    ("cli", "__init__", "__main__"),
)
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}
#: Of one package, likewise.
WITHIN = (
    ("native", "native.tables", "native.library", "native.neighbours", "native.tiles"),
    tuple(
        f"ring{name}"
        for name in (
            "", ".layout", ".needs", ".boxes", ".counting", ".traffic", ".listing", ".blocks", ".parts", ".exchange",
            ".sums", ".engine", ".link", ".agree", ".shards", ".ulysses", ".freight", ".footprint", ".schedule",
            ".rates", ".forecast", ".run", ".trial", ".joint", ".route",
        )
    ),
)  # fmt: skip
LONGEST = 420  #: lines of a file: one that is longer is about more than one thing
TORCH_FREE = (
    "errors",
    "units",
    "logging",
    "group",
    "intervals",
    "stopwatch",
    "racing",
    "cuda_timing",
    "features",
    "kriging",
    "learned",
    "gains",
    "threshold",
    "regret",
    "pattern",
    "measure",
    "choice",
    "memory",
    "machine",
    "order",
    "reorder",
    "entry",
    "store",
    "sealed",
    "contact",
    "quarantine",
    "guard",
    "explanation",
    "cli",
)


def modules() -> dict[str, Path]:
    """Dotted names under attn_dispatch, with their files."""
    found = {}
    for path in sorted(files(ROOT)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def files(folder: Path) -> Iterator[Path]:
    """Through links to folders too, which a recursive glob does not follow in every version of Python."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from files(path)
        elif path.suffix == ".py":
            yield path


MODULES = modules()


def imports(path: Path) -> set[str]:
    """The modules under attn_dispatch that a file imports, at its top, in functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports are absolute"
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


def layer(name: str) -> int:
    return LAYER[name.split(".")[0]]


def test_the_files_are_found() -> None:
    assert {"store", "backends.sdpa", "cli", "__init__"} <= MODULES.keys()
    assert imports(MODULES["recording"]) == {"dispatch", "errors", "problem"}


def test_every_module_has_its_place() -> None:
    places = {name.split(".")[0] for name in MODULES} - {"profiles"}
    assert places == LAYER.keys()


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"profiles"}))
def test_imports_point_one_way(name: str) -> None:
    for imported in imports(MODULES[name]):
        among_commands = name.startswith(("cli", "__main__")) and imported.startswith("cli")
        within = any({name, imported} <= set(w) and w.index(imported) < w.index(name) for w in WITHIN)
        assert among_commands or within or layer(imported) < layer(name), f"{name} imports {imported}"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("backends.")])
def test_backends_stand_alone(name: str) -> None:
    assert not {imported for imported in imports(MODULES[name]) if imported.startswith(("backends", "registry"))}


def test_files_are_short() -> None:
    here = Path(__file__).parents[1]
    found = [path for folder in (ROOT, here, here.parent / "tools") for path in files(folder)]
    assert {"tuner.py", "sdpa.py", "common.py", "conftest.py"} <= {path.name for path in found}
    assert [path for path in found if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST] == []


# --- what is loaded ---------------------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    code += "\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("name", TORCH_FREE)
def test_no_torch_at_import(name: str) -> None:
    loaded = loaded_by(f"import attn_dispatch.{name}")
    assert f"attn_dispatch.{name}" in loaded
    assert "torch" not in loaded


def test_a_permutation_loads_no_more_than_it_needs() -> None:
    """Some of torch's functions load its symbolic mathematics, which takes half a second of a first call."""
    code = "from attn_dispatch import Neighborhood, attend; from attn_dispatch.spec import orders as order\n"
    before = loaded_by(code)
    code += "order.permutation('hilbert', Neighborhood((7, 9), (3,), (2, 1)), 63)\n"
    code += "order.permutation('residue', Neighborhood((63,), (3,), (2,)), 63)"
    assert "attn_dispatch.spec.hilbert" in loaded_by(code)
    assert not (loaded_by(code) - before) & {"sympy", "torch._refs", "torch.fx"}


def test_the_package_alone_loads_nothing() -> None:
    loaded = loaded_by("import attn_dispatch")
    assert {name for name in loaded if name.startswith("attn_dispatch.")} == set()
    assert not loaded & {"torch", "msgspec", "rich", "numpy"}


def test_attend_loads_no_more_than_it_needs() -> None:
    before = loaded_by("import torch")
    loaded = loaded_by("import attn_dispatch\nattn_dispatch.attend")
    assert "attn_dispatch.dispatch" in loaded
    assert not (loaded - before) & {"xformers", "flash_attn", "triton", "rich", "torch._dynamo", "pynvml", "matplotlib"}
    assert not loaded & {"xformers", "flash_attn", "rich", "torch._dynamo"}
