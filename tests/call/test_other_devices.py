"""A device that torch knows as its accelerator, and this package not by name: in processes of their own, since torch
cannot forget one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes

CODE = "import json, sys; from tests.support.private_device import main; print(json.dumps(main(*sys.argv[1:])))"
SILICON = "elsewhere-made-up-1"


@pytest.fixture(scope="module")
def device() -> str:
    """The compiled device."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    from tests.support import private_device

    return str(private_device.library(compiler))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


def task(device: str, store: Path, name: str, *arguments: str, **variables: str) -> tuple[str, Any]:
    """What a process prints that has this device, and what its task gives."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {"ATTN_DISPATCH_CACHE_DIR": str(store), **variables}.items():
            patch.setenv(variable, value)
        done = processes.run(CODE, device, name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def decided(device: str, store: Path) -> tuple[str, Any]:
    """A process that measures: calls, and the command `profile`."""
    return task(device, store, "decided", "profile", "--shape", "1,64,2,16", ATTN_DISPATCH_BUDGET_MS="300")


@pytest.mark.parametrize("ways", [(), pytest.param(("every",), marks=pytest.mark.full)], ids=["some", "every"])
def test_every_backend_is_right_on_it(ways: tuple[str, ...], device: str, store: Path) -> None:
    _, found = task(device, store, "forced", *ways)
    wrong = {
        name: by_backend
        for name, by_backend in found.items()
        if any(isinstance(each, list) and each for each in by_backend.values())
    }
    assert wrong == {}
    able = {name: [each for each, answer in found[name].items() if answer == []] for name in found}
    assert able["dense"] == able["causal, training"] == able["grouped"] == ["sdpa", "sdpa_mask", "tiles", "manual"]
    assert able["window"] == able["ranges, training"] == able["few queries"] == ["sdpa_mask", "tiles", "manual"]
    assert able["dense, training through lse"] == ["tiles", "manual"]
    assert able["softcap"] == ["manual"]
    assert able["operator"] == [""]
    assert "returns no lse on elsewhere" in found["dense, training through lse"]["sdpa"]


def test_it_is_measured_by_the_host(decided: tuple[str, Any]) -> None:
    text, found = decided
    calls = found["calls"]
    assert {name: (call["wrong"], call["source"]) for name, call in calls.items()} == dict.fromkeys(
        calls, ([], "measured")
    )
    assert found["waits"] > 0
    assert "Made up (R) 1" in calls["dense"]["text"]
    assert "8 backends need CUDA" in calls["dense"]["text"]
    assert found["exit"] == 0
    assert "Made up (R) 1" in text


def test_another_process_measures_nothing(decided: tuple[str, Any], device: str, store: Path) -> None:
    """What was measured is stored under the device's own name, which `doctor` tells."""
    text, again = task(device, store, "decided", "doctor", ATTN_DISPATCH_MODE="locked")
    choices, known = ({name: call["choice"] for name, call in each["calls"].items()} for each in (again, decided[1]))
    assert choices == known
    assert {call["source"] for call in again["calls"].values()} == {"measured"}
    assert "elsewhere:0: Made up (R) 1, memory: unknown, times by the host's clock, float64 on the CPU" in text
    assert SILICON in text
    assert SILICON in " ".join(path.name for path in store.rglob("*"))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sdpa", "sdpa_mask", "tiles", "manual"])
def test_conformance(backend: str, device: str, store: Path) -> None:
    assert task(device, store, "conformance", backend)[1]
