"""The examples run, small, and show what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import problems

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def printed(folder: Path, name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """What an example prints, run from another folder with an empty cache."""
    own = {"ATTN_DISPATCH_MODE": "off", "ATTN_DISPATCH_CACHE_DIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.full
def test_context_parallel_loses_what_one_process_loses(tmp_path: Path) -> None:
    """By the command in its docstring; `--check` fails where a loss is another than on whole sequences."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    text = printed(tmp_path, "context_parallel", "--check", launcher=launcher)
    losses = numbers(r"^step \d: loss ([\d.]+), 256 tokens over 2 ranks$", text)
    alone = re.search(r"^in one process: (.*)$", text, re.M)
    assert alone is not None
    assert len(losses) == len(alone[1].split(", ")) == 2
    assert losses[1] < losses[0]


@pytest.mark.full
def test_the_byte_language_model_learns_and_writes(tmp_path: Path) -> None:
    text = printed(tmp_path, "byte_language_model", "--steps=12", "--tokens=256", "--written=8")
    losses = numbers(r"^step .*validation ([\d.]+)$", text)
    assert losses[-1] < losses[0] - 1
    assert "\nThe class statement " in text


@pytest.mark.full
def test_dilated_attention_recalls_what_a_window_cannot_see(tmp_path: Path) -> None:
    text = printed(tmp_path, "long_range_recall", "--steps=100", "--tokens=384")
    right = dict(re.findall(r"^(\w+) +(\d+)% right", text, re.M))
    assert int(right["dilated"]) > 90
    assert int(right["dense"]) > 90
    assert int(right["window"]) < 40


@pytest.mark.full
def test_hilbert_order_throughout_gives_what_rows_give(tmp_path: Path) -> None:
    text = printed(tmp_path, "image_neighborhood", "--steps=12", "--side=24")
    losses = numbers(r"^step .*loss ([\d.]+)$", text)
    assert losses[-1] < losses[0]
    (apart,) = numbers(r"differ by ([\d.e+-]+) at most$", text)
    assert apart < 1e-4


@pytest.mark.full
def test_cubes_of_a_video_keep_more_than_rows(tmp_path: Path) -> None:
    text = printed(tmp_path, "video_blocks", "--grid", "8", "8", "16", "--window=7")
    for about in (r"neighbourhoods: ([\d.]+)%", r"top_k: keeps ([\d.]+)%"):
        natural, cubes, hilbert = numbers(rf"^\w+ +{about}", text)
        assert min(cubes, hilbert) > natural
    assert max(numbers(r"differs from float64 by ([\d.e+-]+) at most$", text)) < 1e-4


@pytest.mark.full
def test_padding_does_not_change_a_slides_features(tmp_path: Path) -> None:
    text = printed(tmp_path, "slide_features", "--tiles=90", "--layers=1")
    exact = numbers(r"^exact pattern .*changes ([\d.e+-]+) of", text)
    assert exact[0] < 1e-5


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_decoder_is_finetuned_dense_and_dilated(tmp_path: Path) -> None:
    text = printed(tmp_path, "long_finetuning", "--tokens=512", "--steps=1")
    found = dict(re.findall(r"^(\w+, \w+) +loss ([\d.]+);", text, re.M))
    assert float(found["dense, attn_dispatch"]) == pytest.approx(float(found["dense, sdpa"]), abs=1e-3)
    assert found.keys() == {"dense, sdpa", "dense, attn_dispatch", "dilated, attn_dispatch"}


STEP = re.compile(r"^(ENV|RUN|CMD) (.*)$", re.MULTILINE)
CALL = "import torch; x = torch.ones(1, 64, 2, 16); print(attn_dispatch.attend(x, x, x, is_causal=True).sum().item())"


@pytest.mark.full
def test_the_image_serves_without_a_compiler(tmp_path: Path) -> None:
    """Its steps in a new home, of which the last, and a call beside it, find no compiler; another call is refused."""
    kept = {name: value for name, value in os.environ.items() if not re.match("ATTN_|XDG_|TORCH|TRITON|CXX", name)}
    environment, printed = {**kept, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}, []
    (tmp_path / "problems.jsonl").write_text(json.dumps(problems("--shape", "1,64,2,16", "--causal")[0].to_dict()))
    for kind, text in STEP.findall((EXAMPLES / "Dockerfile").read_text(encoding="utf-8")):
        text = text.replace("/opt/attention", str(tmp_path)).replace(
            "attn-dispatch ", f"{sys.executable} -m attn_dispatch "
        )
        if kind == "ENV":
            name, _, environment[name] = text.partition("=")
        elif "attn_dispatch" in text:
            if kind == "CMD":
                environment["CXX"] = "no-such-compiler"
                text = text.replace("python ", f"{sys.executable} ")[:-1] + f'; {CALL}"'
            done = subprocess.run(text, shell=True, env=environment, capture_output=True, text=True, timeout=240)
            printed.append(done.stdout)
            assert done.returncode == 0, done.stderr
    assert environment["ATTN_DISPATCH_COMPILE"] == "never"
    assert printed[-1].splitlines() == ["1 problems are warm", "2048.0"]


def test_the_documentation_names_every_example() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for path in (each for each in EXAMPLES.iterdir() if not each.name.startswith("__")):
        assert f"examples/{path.name}" in text
