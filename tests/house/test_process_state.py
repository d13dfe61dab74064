"""What a process keeps in tables is forgotten as a whole."""

from __future__ import annotations

import ast

import torch

import attn_dispatch
from attn_dispatch import attend, process_state
from attn_dispatch.calls import routes
from attn_dispatch.decisions import decide
from tests.house.test_architecture import MODULES, nodes

#: What is held for a process's threads, calls and files, or follows from arguments alone, and outlives decisions.
HELD = {
    "compat.sdpa._entered",
    "decisions.decide._deciding",
    "decisions.call._observers",
    "kernels.device_cache._captured",
    "kernels.device_cache._compiling",
    "kernels.registry._guards",
    "private.NAMES",
    "ring.link._links",
    "store.quarantine._own_markers",
}


def tables(module: str) -> set[str]:
    """Module-level names that begin as an empty container and are not registered in the same file."""
    text = MODULES[module].read_text(encoding="utf-8")
    tree, *_ = nodes(module)
    assert isinstance(tree, ast.Module)
    found = set()
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        value = ast.unparse(node.value) if isinstance(node, ast.AnnAssign) and node.value else ""
        if isinstance(target, ast.Name) and value in ("{}", "[]", "set()", "Counter()", "OrderedDict()", "dict()"):
            found.add(target.id)
    registered = [line for line in text.splitlines() if line.startswith("process_state.register(")]
    return {name for name in found if not any(f"{name}.clear" in line for line in registered)}


def test_every_table_is_registered_or_held() -> None:
    found = {f"{module}.{name}" for module in MODULES for name in tables(module)}
    assert found == HELD


def test_forgetting_by_kind() -> None:
    x = torch.zeros(1, 4, 1, 8)
    attend(x, x, x, backend="manual")
    attend(x, x, x)
    decided = dict(decide._decided)
    assert routes.routes
    assert decided
    process_state.forget(process_state.ROUTES)
    assert not routes.routes
    assert decide._decided == decided
    process_state.forget_all()
    assert not decide._decided
    assert not any(attn_dispatch.counters().values())
