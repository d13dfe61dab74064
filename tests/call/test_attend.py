"""attend() and explain(): arguments, results and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, register
from attn_dispatch.calls import routes
from attn_dispatch.decisions import decide
from attn_dispatch.decisions.call import observing
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import EXCHANGES, ORDERS
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from tests.support.calls import BUILT_IN, RUN_HERE, Plugin, close, counted, formula, qkv, threads

pytestmark = pytest.mark.usefixtures("little_time")


# --- results ----------------------------------------------------------------------------------------------------------


def test_lse_in_each_dtype(set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        q, k, v = qkv(dtype=dtype)
        out, lse = attend(q, k, v, return_lse=True)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (out.dtype, lse.dtype, lse.shape) == (dtype, wide, (1, 2, 16))
        assert isinstance(attend(q, k, v), Tensor)


@pytest.mark.parametrize("watched", [False, True], ids=["", "observed"])
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("name", ["native", "sdpa", "manual"])
def test_repeated_calls_do_what_the_backend_does(name: str, return_lse: bool, layout: str, watched: bool) -> None:
    """Also in other memory, and once the number of threads or a tensor's need of gradients changes."""
    backend, runs, calls = registry.load(name), [], 0

    def around(run: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
        def counted_run(*given: Any) -> Any:
            runs.append(problem)
            return run(*given)

        return counted_run

    with observing(lambda problem: None, around) if watched else nullcontext():
        for (count, grad), factor in product(((1, False), (2, False), (1, True)), (1.0, -0.5, 2.0)):
            q, k, v = (x * factor for x in qkv(40))
            q.requires_grad_(grad)
            problem = Problem.of(q, k, v, Dense(is_causal=True), return_lse=return_lse)
            with threads(count):
                result: Any = backend.run(q, k, v, problem)
                result = result if isinstance(result, tuple) else (result, None)
                q, k, v = (x.transpose(1, 2) for x in (q, k, v)) if layout == "bhnd" else (q, k, v)
                found: Any = attend(q, k, v, is_causal=True, backend=name, layout=layout, return_lse=return_lse)
            out, lse = found if return_lse else (found, None)
            out = out.transpose(1, 2) if layout == "bhnd" else out
            calls += 1
            assert torch.equal(out, result[0])
            assert lse is None or torch.equal(lse, result[1])
            assert (out.stride(), out.requires_grad) == (result[0].stride(), grad)
    assert len(runs) == calls * watched


class Specialist(Plugin):
    """Fails where it is to make a function for a call."""

    def specialized(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False) -> Any:
        with ThreadPoolExecutor(1) as other_thread:  # it may compile for seconds: other threads' first calls go on
            assert other_thread.submit(is_free, decide.lock).result(), "the lock is held"
        raise ValueError("no such function")


def is_free(lock: Any) -> bool:
    found: bool = lock.acquire(timeout=1)
    if found:
        lock.release()
    return found


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_a_specialized_that_raises(layout: str) -> None:
    register(Specialist())
    with pytest.raises(BackendFailed, match=r"planted failed on .*ValueError: no such function"):
        attend(*qkv(), backend="planted", layout=layout)


def test_masks_belong_to_the_call_and_not_to_the_route() -> None:
    q, k, v = qkv()
    for length in (16, 3, 9):
        out = attend(q, k, v, seq_lens=torch.tensor([length]))
        assert close(out[:, :length], formula(q[:, :length], k[:, :length], v[:, :length], Dense())[0])
        assert not out[:, length:].any()
    with pytest.raises(InvalidInput, match="seq_lens must lie in"):
        attend(q, k, v, seq_lens=torch.tensor([17]))
    assert counted(measured=1)


def test_any_sequence_of_branches() -> None:
    q, k, v = qkv()
    expected = attend(q, k, v, Dilated((4, 8), (1, 2)))
    kinds: list[Callable[[list[int]], Any]] = [tuple, list, reversed, np.array, torch.tensor, iter]
    for kind in kinds:
        counts = []
        for _ in range(2):
            branches: dict[str, Any] = {"segment_lengths": kind([4, 8]), "dilation_rates": kind([1, 2])}
            assert torch.equal(attend(q, k, v, **branches), expected)
            counts.append(len(routes.routes))
        assert counts[0] == counts[1], "a repeated call adds no route"
    assert counted(measured=1)
    one: dict[str, Any] = {"segment_lengths": 8, "dilation_rates": np.array(2), "backend": "manual"}
    assert torch.equal(attend(q, k, v, **one), attend(q, k, v, Dilated((8,), (2,)), backend="manual"))


def test_meta_tensors_are_explained_and_not_run() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    found = explain(q, k, v, segment_lengths=[4, 8], dilation_rates=[1, 2])
    assert found.choice is not None
    assert "Dilated((4, 8), (1, 2))" in found.problem
    with pytest.raises(InvalidInput, match=r"meta device and hold no data; explain\(\) takes them"):
        attend(q, k, v)


def test_invalid_input_has_no_exception_context() -> None:
    """Exceptions while searching a route are not shown to the caller."""
    with pytest.raises(InvalidInput) as raised:
        attend(*qkv(), seq_lens=[1, 2])  # type: ignore[arg-type]
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


# --- one forced backend -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("backend", RUN_HERE)
def test_a_forced_backend_runs(backend: str, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    q, k, v = qkv()
    out, lse = attend(q, k, v, is_causal=True, backend=backend, order="natural", return_lse=True)
    exact = formula(q, k, v, Dense(is_causal=True))
    assert close(out, exact[0])
    assert close(lse, exact[1])
    found = explain(q, k, v, is_causal=True, backend=backend, order="natural")
    assert (found.choice, found.order, found.source) == (backend, "natural", "forced")
    assert [row.status for row in found.candidates] == ["chosen"]
    assert counted(forced=1)
    assert not cache_folder().exists()


def test_a_forced_backend_that_refuses() -> None:
    with pytest.raises(NoBackend) as raised:
        attend(*qkv(), Window(3, 0), dropout_p=0.5, backend="sdpa")
    parts = ("Window(left=3, right=0)", "q [1, 16, 2, 8]", "asked for 0.5", "computes Dense, Dilated", "backend=None")
    assert [part for part in parts if part not in str(raised.value)] == []
    found = explain(*qkv(), Window(3, 0), dropout_p=0.5, backend="sdpa")
    assert (found.choice, found.order, found.source) == (None, None, "forced")
    assert [row.status for row in found.candidates] == ["unsupported"]
    assert "asked for 0.5" in found.candidates[0].reason
    for given in (Window(4096, 0), Dilated((4096,), (1,), is_causal=True)):
        with pytest.raises(NoBackend, match=rf"run Dense\(causal\), given as {re.escape(str(given))} in natural"):
            attend(*qkv(), given, dropout_p=0.5, backend="sdpa", order="natural")


KNOWN = f"order must be None or one of {', '.join(map(repr, ORDERS))}"


@pytest.mark.parametrize("call", [attend, explain])
def test_unknown_names(call: Callable[..., Any]) -> None:
    texts: list[tuple[dict[str, Any], str]] = []
    for name in ("abacus", "", 3, ["sdpa"], "../manual"):
        texts.append(({"backend": name}, f"backend must be None or one of {', '.join(BUILT_IN)}, got {name!r}"))
    for name in ("random", "", 3, ["natural"]):
        texts.append(({"order": name}, f"{KNOWN}, got {name!r}"))
    for name in EXCHANGES:
        text = f"{KNOWN}, got {name!r}: an exchange of rows between ranks, which needs mesh="
        texts += [({"order": name, "backend": backend}, text) for backend in (None, "manual", "native")]
    for given, text in texts:
        with pytest.raises(InvalidInput) as raised:
            call(*qkv(), **given)
        assert str(raised.value) == text


def test_no_backend() -> None:
    shared = replace(Problem.of(*qkv()), ranks=2)
    with pytest.raises(NoBackend) as raised:
        decide.decision_for(shared)
    lines = str(raised.value).splitlines()
    assert [line.strip().split(":")[0] for line in lines[2:]] == BUILT_IN
    assert all("sharded over 2" in line for line in lines[2:])
    assert issubclass(NoBackend, AttnDispatchError)
    found = decide.explain_problem(shared)
    assert found.choice is None
    assert found.order is None


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_runs_nothing() -> None:
    found = explain(*qkv())
    assert found.source == "heuristic"
    assert counted()
    assert not cache_folder().exists()


@pytest.mark.parametrize("measured", [False, True])
def test_an_explanation_is_a_table(measured: bool) -> None:
    q, k, v = qkv()
    register(Plugin(reasons=[Refusal("moon", "not at full moon")]))
    if measured:
        attend(q, k, v)
    found = explain(q, k, v)
    assert [row.backend for row in found.candidates] == [*BUILT_IN[:-1], "planted", BUILT_IN[-1]]
    *lines, last = str(found).partition("verdict\n")[2].splitlines()
    elsewhere = [row.backend for row in found.candidates if "runs on cuda" in row.reason]
    assert last == f"{len(elsewhere)} backends need CUDA: {', '.join(elsewhere)}"
    here = [row.backend for row in found.candidates if row.backend not in elsewhere]
    assert [line.split()[0] for line in lines if line[0] != " "] == here
    assert any(line.startswith("planted ") and line.endswith("unsupported: not at full moon") for line in lines)
    assert found.key in str(found)
    assert json.loads(json.dumps(found.to_dict()))["choice"] == found.choice


def test_explain_takes_the_arguments_of_attend() -> None:
    for name in ("colour", "device"):
        with pytest.raises(TypeError, match=rf"explain\(\) got an unexpected keyword argument '{name}'"):
            explain(*qkv(), **{name: "cpu"})  # type: ignore[arg-type]
