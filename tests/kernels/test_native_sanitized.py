"""The native kernel under sanitizers: passes in threads, over memory of exact size, against float64."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.native import run
from attn_dispatch.kernels.native.library import cpu_flags
from attn_dispatch.kernels.native.variants import V3
from attn_dispatch.machine.compiler import compiler
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.testing import random_problems
from tests.support.cases import failures
from tests.support.native_driver import Program

#: -Og: with more, the compiler takes minutes to instrument products that are unrolled.
OPTIONS = ("-Og", "-g1", "-pthread", "-fno-sanitize-recover=all")
LEVELS = {"native": frozenset[str](), "x86-64-v3": V3, "x86-64": frozenset[str]()}
LONGNET = Dilated((32, 64, 128), (1, 2, 4), is_causal=True)
#: Tiles of every kind: bands, branches, listed keys, few queries of several heads, splits of long sequences.
KINDS: dict[tuple[int, int, int, int], tuple[Pattern, dict[str, Any]]] = {
    (1, 70, 2, 40): (Dense(), {"k_len": 230}),
    (1, 65, 2, 33): (Dense(is_causal=True), {"kv_heads": 1, "softcap": 0.5}),
    (2, 100, 2, 32): (Window(37, 5, 3), {"has_key_mask": True, "k_len": 130}),
    (1, 30, 2, 16): (Dense(is_causal=True), {"bias": (1, 2), "bias_needs_grad": True, "alibi_axes": 1}),
    (1, 150, 4, 16): (LONGNET, {}),
    (2, 256, 2, 64): (Dilated((256,), (2,)), {"has_seq_lens": True, "has_key_mask": True}),
    (1, 210, 2, 32): (Neighborhood((14, 15), (9, 9)), {"has_key_mask": True}),
    (1, 20, 6, 32): (Dense(is_causal=True), {"kv_heads": 2, "k_len": 1100}),
    (2, 1, 4, 64): (Dense(), {"kv_heads": 1, "k_len": 1200, "has_key_mask": True, "alibi_axes": 1}),
    (1, 2, 8, 128): (Dense(is_causal=True), {"kv_heads": 4, "k_len": 130}),
    (1, 6, 4, 24): (Dense(), {"kv_heads": 2, "k_len": 150}),
    (1, 3, 4, 64): (LONGNET, {"kv_heads": 2, "k_len": 250}),
}
RANDOM = 6  #: further problems, of any size and layout

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("three_threads")]


def options_of(sanitizer: str, level: str, folder: Path) -> list[str]:
    """The compiler may lack the sanitizer's library, or the system the addresses that it needs."""
    if level != "native" and (platform.machine() != "x86_64" or not LEVELS[level] <= cpu_flags()):
        pytest.skip(f"this processor cannot run {level}")
    source, program, options = folder / "empty.cpp", str(folder / "empty"), [f"-fsanitize={sanitizer}", *OPTIONS]
    source.write_text("int main() {}\n")
    try:
        subprocess.run([*compiler(), *options, str(source), "-o", program], capture_output=True, check=True)
        subprocess.run([program], check=True, timeout=60)
    except (ImportError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no empty program with -fsanitize={sanitizer}: {error}")
    return [*options, f"-march={level}", "-DOWN_THREADS"]


def problems(dtype: torch.dtype) -> Iterator[Problem]:
    for shape, (pattern, more) in KINDS.items():
        problem = replace(
            problem_of(shape, Dense(), dtype, torch.device("cpu"), backward=True), return_lse=True, **more
        )
        yield replace(problem, pattern=pattern.simplify(problem.q_len, problem.k_len, problem.heads))
    drawn = (replace(each, needs_grad=True) for each in random_problems(0, 2 * RANDOM, dtypes=[dtype]))
    yield from [each for each in drawn if not refusals_of(registry.load("native"), each)][:RANDOM]


# Races are those of threads, whatever the instructions.
@pytest.mark.parametrize(("level", "sanitizer"), [*product(LEVELS, ["address,undefined"]), ("native", "thread")])
def test_no_fault_and_the_results_of_float64(
    level: str, sanitizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(sanitizer, level, tmp_path)
    program = Program.used(monkeypatch, tmp_path, compiler(), *options)
    for dtype in run.DTYPES:
        for problem in problems(dtype):
            found = failures(registry.load("native"), problem)
            assert not found, (problem, found)
    assert program.calls >= 2 * len(KINDS) * len(run.DTYPES)
