"""Calls with other features of torch: autocast, settings, autograd, checkpoints and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend, compat, counters, explain, profile, register
from attn_dispatch.backends import sdpa
from attn_dispatch.calls import routes
from attn_dispatch.kernels.dense import CpuFlash
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.torch_settings import deterministic, settings
from attn_dispatch.tuning.candidates import current_environment
from tests.support import processes
from tests.support.calls import close, counted, formula, precision, qkv
from tests.support.pairwise import crossed
from tests.support.planted import Planted, right

pytestmark = pytest.mark.usefixtures("short_trials")


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = qkv()
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(q, k, v), attend(q, k, v, return_lse=True)[1]
        assert attend(q[:, :0], k, v).dtype == torch.bfloat16  # without anything to compute
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected)
    assert attend(q, k, v).dtype == torch.float32
    wide: Any = [x.double() for x in (q, k, v)]
    expected = attend(*wide)
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(*wide), expected)
        attend(q, k, v).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert q.grad.any()


def test_autocast_does_not_reach_the_trial() -> None:
    """With it, float32 checks would run in bfloat16, and correct backends would be rejected."""
    with torch.autocast("cpu", torch.bfloat16):
        attend(*qkv())
        found = explain(*qkv())
    assert {row.backend: row.status for row in found.candidates if row.status in ("incorrect", "failed")} == {}


# --- settings of the caller -------------------------------------------------------------------------------------------


def test_settings_that_are_part_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    attend(q, k, v)
    with precision("medium"):
        attend(q, k, v)
    assert counted(measured=2)
    for warns in (True, False):
        torch.use_deterministic_algorithms(True, warn_only=warns)
        try:
            assert Problem.of(q, k, v).deterministic != warns
            attend(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
        assert counted(measured=2 if warns else 3)
    attend(q, k, v)
    assert counted(measured=3)


@pytest.mark.parametrize("warns", [False, True])
def test_a_backward_pass_is_as_deterministic_as_its_forward_pass(
    warns: bool, set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernels ask for its setting in each pass, and take one that only warns for none."""
    set_mode("off")
    found, real = [], CpuFlash.backward

    def backward(*args: Any) -> Any:
        found.append(deterministic())
        return real(*args)

    monkeypatch.setattr(CpuFlash, "backward", backward)
    q = qkv()[0].requires_grad_()
    with settings(False):
        torch.use_deterministic_algorithms(warns, warn_only=warns)
        for wanted in (True, False):
            compat.flash_attn_func(q, q, q, deterministic=wanted).sum().backward()
            assert torch.are_deterministic_algorithms_enabled() == warns
    assert found == [True, False]


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="this torch has one kernel"
)
def test_what_takes_the_place_of_pytorchs_flash_kernel_is_part_of_a_problem() -> None:
    attention, q = torch.nn.attention, qkv(dtype=torch.float16)[0]
    attention.register_flash_attention_impl("made_up", register_fn=lambda: SimpleNamespace(remove=lambda: None))

    def state() -> tuple[object, ...]:
        attend(q, q, q)
        x = q.to("meta")
        on_cuda = Problem.of(x, x, x, device="cuda:0")
        return on_cuda, on_cuda.key("cuda-made-up"), sdpa.version(), current_environment(), len(routes.routes)

    before = state()
    attention.activate_flash_attention_impl("made_up")
    try:
        active = state()
    finally:
        attention.restore_flash_attention_impl()
    assert all(one != other for one, other in zip(before, active))
    assert active[2] == f"{before[2]} made_up"
    assert (*active[:4], 1) != (*state()[:4], 1) == (*before[:4], 1)
    assert counted(measured=1)  # on a CPU nothing changes


def test_a_problem_is_measured_under_its_own_settings() -> None:
    """Not those of the process that profiles it."""
    found = set()

    def noting(*given: Any) -> Any:
        found.add((deterministic(), torch.get_float32_matmul_precision()))
        return right(*given)

    register(Planted(noting))
    plain = Problem.of(*qkv())
    profile([replace(plain, deterministic=True, matmul_precision="high")], progress=False, budget_s=3.0)
    assert found == {(True, "high")}
    assert Problem.of(*qkv()) == plain


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has no such interface")
def test_settings_of_the_newer_matmul_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call of it, torch refuses calls of the older interface."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; from attn_dispatch import attend, explain;"
        "x = torch.randn(1, 8, 2, 4); one = lambda: attend(x, x, x, backend='manual'); one(); one();"
        "print(explain(x, x, x).problem)"
    )
    done = processes.run(code)
    assert "matmul high" in done.stdout


def test_the_default_device_does_not_reach_the_trial() -> None:
    q, k, v = qkv()
    torch.set_default_device("meta")
    try:
        out = attend(q, k, v)
    finally:
        torch.set_default_device(None)
    assert close(out, formula(q, k, v, Dense())[0])
    assert counted(measured=1)


def test_a_trial_does_not_change_random_numbers() -> None:
    """A run draws the same numbers with and without a trial."""
    q, k, v = qkv()
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        routes.routes.clear()
        drawn.append((attend(q, k, v, dropout_p=0.5), torch.rand(3)))
    assert counted(measured=1)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(run: Callable[..., Tensor], pattern: Pattern) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = run(q, k, v, pattern)
    torch.autograd.backward(out.square().sum())
    found = [x.grad for x in (q, k, v)]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def exact_gradients(pattern: Pattern) -> list[Tensor]:
    return gradients(lambda q, k, v, pattern: formula(q, k, v, pattern)[0], pattern)


RUNS: dict[str, Callable[..., Tensor]] = {
    "leaf": attend,
    "non-leaf": lambda q, k, v, pattern: attend(q * 1, k * 1, v * 1, pattern),
    "checkpoint": partial(checkpoint, attend, use_reentrant=False),
    "checkpoint-reentrant": partial(checkpoint, attend, use_reentrant=True),
}


@crossed(
    lambda name, pattern: {"name": name}, name=tuple(RUNS), pattern=(Dense(), Window(4, 2), Dilated((4, 16), (1, 2)))
)
def test_gradients(name: str, pattern: Pattern) -> None:
    """The first call measures, wherever it is made."""
    run = RUNS[name]
    for found, exact in zip(gradients(run, pattern), exact_gradients(pattern), strict=True):
        assert close(found, exact.double())
    assert counters()["measured"] == (2 if name == "checkpoint-reentrant" else 1)


def test_inference_mode_then_training() -> None:
    with torch.inference_mode():
        q, k, v = qkv()
        assert close(attend(q, k, v, Window(4, 2)), formula(q, k, v, Window(4, 2))[0])
    for found, exact in zip(gradients(attend, Window(4, 2)), exact_gradients(Window(4, 2)), strict=True):
        assert close(found, exact.double())
