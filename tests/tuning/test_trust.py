"""Wrong, crashing, hanging and greedy backends: each is reported and quarantined, and the call is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_dispatch import Problem, attend, explain, profile, register
from attn_dispatch.backends import manual
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Row
from attn_dispatch.store.quarantine import Quarantine
from tests.support import planted, processes
from tests.support.calls import close, forget, formula, qkv
from tests.support.pairwise import thinned
from tests.support.planted import Planted

pytestmark = pytest.mark.usefixtures("little_time")

WRONG: dict[str, tuple[planted.Fault, dict[str, Any], str, str]] = {
    "out": (planted.wrong_out, {}, "incorrect", "out is off by"),
    "lse": (planted.wrong_lse, {"return_lse": True}, "incorrect", "lse is off by"),
    "nan-grad-q": (planted.nan_grad_q, {"grad": True}, "incorrect", "dq has NaN"),
    "mask": (planted.ignores_mask, {"key_mask": True}, "incorrect", "out is off by"),
    "partial": (planted.partial_write, {}, "incorrect", "out "),
    "hangs": (planted.hangs, {}, "hung", "did not return within 1"),
    "allocates": (planted.allocates, {}, "memory", ""),
    "undeclared": (planted.lies, {}, "memory", "workspace_bytes declared"),
}


def report(arguments: dict[str, Any]) -> Row:
    found = explain(*inputs(arguments), **plain(arguments))
    return next(row for row in found.candidates if row.backend == "planted")


def inputs(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv(arguments.get("length", 32))
    if arguments.get("grad"):
        q.requires_grad_()
    return q, k, v


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in arguments.items() if name not in ("grad", "key_mask", "length")}
    if arguments.get("key_mask"):
        found["key_mask"] = torch.arange(arguments.get("length", 32))[None] < 20
    return found


@thinned(("fault", "arguments", "kind", "message"), WRONG.values(), 2, WRONG)
def test_a_wrong_backend_is_reported_and_quarantined(
    fault: planted.Fault, arguments: dict[str, Any], kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "1")
    backend = Planted(fault)
    register(backend)
    q, k, v = inputs(arguments)
    result = attend(q, k, v, **plain(arguments))
    if not arguments.get("key_mask"):
        exact = formula(q.detach(), k, v, Dense())
        assert close(result[0] if isinstance(result, tuple) else result.detach(), exact[0])
    if not Quarantine(cache_folder(), silicon("cpu")).entries():  # it lost: only `profile` checks losers to the end
        profile([Problem.of(q, k, v, **plain(arguments))], budget_s=1.0, progress=False, force=True)
    row = report(arguments)
    assert row.status == ("incorrect" if kind == "incorrect" else "quarantined")
    assert message in row.reason
    (entry,) = Quarantine(cache_folder(), silicon("cpu")).entries()
    assert (entry.backend, entry.version, entry.kind) == ("planted", "1", kind)
    tried = backend.calls
    forget()
    shorter = {**arguments, "length": 24}
    attend(*inputs(shorter), **plain(shorter))
    assert backend.calls == tried
    assert report(shorter).status == "quarantined"
    assert row.reason in report(shorter).reason


DYING = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
from attn_dispatch import Problem, attend, explain, profile, register
from attn_dispatch.kernels import registry
from attn_dispatch.backends import manual
from tests.support.planted import Planted, {fault}
torch.set_num_threads(1)
backend = Planted({fault})
register(backend)
q = torch.randn(1, 32, 2, 8)
attend(q, q, q)
row = next(row for row in explain(q, q, q).candidates if row.backend == "planted")
print(backend.calls, row.status, row.reason)
"""


@thinned("fault", ["aborts", "killed"], 2)
def test_two_deaths_quarantine_the_backend(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "100")
    for _ in range(2):
        assert processes.run(DYING.format(fault=fault)).returncode < 0
    second = processes.run(DYING.format(fault=fault))
    assert second.returncode == 0, second.stderr
    warning, last = second.stdout.splitlines()[0], second.stdout.splitlines()[-1]
    assert "planted" in warning
    assert "doctor --lift" in warning
    assert last.startswith("0 quarantined died")


def test_the_last_resort_is_never_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend must remain."""
    monkeypatch.setattr(registry, "backends", lambda: [registry.load("manual")])
    run: Callable[..., Any] = manual.run
    monkeypatch.setattr(
        manual, "run", lambda *args, **tensors: (run(*args, **tensors)[0] * 1.5, run(*args, **tensors)[1])
    )
    attend(*qkv(32))
    assert Quarantine(cache_folder(), silicon("cpu")).entries() == []
