"""Refusals by declared limits, on simulated devices, with their exact texts."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.backends import sdpa, sdpa_cudnn
from attn_dispatch.decisions.unmeasured import static_decision
from attn_dispatch.kernels import limits, registry
from attn_dispatch.kernels.branches import backend
from attn_dispatch.kernels.branches.backend import Branched, Package, Variant
from attn_dispatch.kernels.dense import CUDA_FLASH, CpuFlash, CudaEfficient, CudaFlash
from attn_dispatch.kernels.limits import ANY, HALF, Limits
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.candidates import Request
from tests.support.distributions import skip_without

PASCAL, TURING, AMPERE, HOPPER, BLACKWELL = (6, 1), (7, 5), (8, 0), (9, 0), (10, 0)
HEAD_DIM = 64
GRID, LONGNET = Neighborhood((8, 16), (3, 3)), Dilated((32, 64), (1, 2), True)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("unknown_packages")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Makes cuda:0 a device of a compute capability, with a cuDNN."""

    def make(capability: tuple[int, int], cudnn: int = 91501) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)

    return make


def problem_of(
    dtype: torch.dtype = F16, pattern: Pattern | None = None, *, needs_grad: bool = True, **changes: Any
) -> Problem:
    """8 heads of 64 on cuda:0, 128 tokens."""
    case = Case("", Dense() if pattern is None else pattern, (1, 128, 8, HEAD_DIM))
    made = replace(case.problem(dtype, needs_grad=needs_grad, device="cuda:0"), return_lse=False)
    return replace(made, **changes)


def texts(name: str, problem: Problem) -> list[str]:
    return [refusal.text for refusal in registry.load(name).refusals(problem)]


# --- kernels by device ------------------------------------------------------------------------------------------------

# Supported capabilities and dtypes of PyTorch's backends.
CHOICES = {
    (PASCAL, F16): ("sdpa", "sdpa_float32"),
    (PASCAL, BF16): ("sdpa_float32",),
    (PASCAL, F32): ("sdpa",),
    (TURING, F16): ("sdpa", "sdpa_float32"),
    (TURING, BF16): ("sdpa_float32",),
    (TURING, F32): ("sdpa",),
    (AMPERE, F16): ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32"),
    (AMPERE, BF16): ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32"),
    (AMPERE, F32): ("sdpa",),
    (HOPPER, BF16): ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32"),
    (HOPPER, F32): ("sdpa",),
    (HOPPER, F64): (),
    (BLACKWELL, F16): ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32"),
}


@pytest.mark.parametrize(("capability", "dtype"), CHOICES, ids=str)
@pytest.mark.parametrize("pattern", [Dense(True), LONGNET], ids=str)
def test_backends_that_run_on_a_device(
    capability: tuple[int, int], dtype: torch.dtype, pattern: Pattern, device: Callable[..., None]
) -> None:
    device(capability)
    problem = problem_of(dtype, pattern)
    found = [name for name in ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32") if not texts(name, problem)]
    assert tuple(found) == CHOICES[capability, dtype]


@pytest.mark.parametrize(
    ("capability", "pattern", "changes", "expected"),
    [
        (HOPPER, Dense(True), {}, "sdpa_cudnn"),
        (AMPERE, Dense(True), {}, "sdpa"),
        (BLACKWELL, Dense(True), {"needs_grad": False}, "sdpa_cudnn"),
        (HOPPER, Dense(True), {"deterministic": True}, "sdpa"),
        (HOPPER, Dense(), {"q_len": 1}, "sdpa"),
        (HOPPER, Dense(True), {"has_key_mask": True}, "sdpa_efficient"),
        (AMPERE, Window(9, 0), {}, "triton"),
        (HOPPER, LONGNET, {}, "triton"),
        (HOPPER, GRID, {}, "triton_tiles"),
        (HOPPER, Reordered(GRID, "hilbert"), {}, "triton_tiles"),
    ],
    ids=str,
)
def test_the_static_choice(
    capability: tuple[int, int], pattern: Pattern, changes: Any, expected: str, device: Any, monkeypatch: Any
) -> None:
    """What is fast there, and nothing of all pairs where a kernel reads those seen. The report calls it the default."""
    skip_without("triton")
    device(capability)
    board = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: board)
    for name, answer in {"kernels.contract.missing_code": "", "tuning.candidates.available_bytes": 2**36}.items():
        monkeypatch.setattr(f"attn_dispatch.{name}", lambda device, answer=answer: answer)
    monkeypatch.setattr("attn_dispatch.tuning.candidates.provenance", lambda device: {})
    request = Request(problem_of(pattern=pattern, **changes), "cuda-sm{}{}-132sm-made-up".format(*capability))
    assert static_decision(request).choice == expected


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [
        (HOPPER, {}, "CudaFlash"),
        (AMPERE, {"head_dim": 256}, "CudaFlash"),
        (AMPERE, {"head_dim": 264}, "CudaEfficient"),
        (AMPERE, {"head_dim": 256, "return_lse": True}, "CudaEfficient"),
        (AMPERE, {"head_dim": 256, "return_lse": True, "needs_grad": False}, "CudaFlash"),
        (AMPERE, {"head_dim": 224}, "CudaFlash"),
        ((8, 9), {"head_dim": 192}, "CudaFlash"),
        ((8, 9), {"head_dim": 192, "return_lse": True}, "CudaEfficient"),
        ((8, 6), {"head_dim": 193}, "CudaEfficient"),
        ((12, 1), {"head_dim": 224}, "CudaEfficient"),
        ((12, 1), {"head_dim": 224, "needs_grad": False}, "CudaFlash"),
        ((12, 0), {"head_dim": 225}, "CudaFlash"),
        (AMPERE, {"dtype": F32}, "CudaEfficient"),
        (TURING, {}, "CudaEfficient"),
    ],
    ids=str,
)
def test_the_kernel_that_sdpa_uses(
    capability: tuple[int, int], changes: dict[str, Any], expected: str, device: Callable[..., None]
) -> None:
    device(capability)
    kernel, _, _ = backend._prepared(sdpa.BACKEND, replace(problem_of(), **changes))
    assert type(kernel).__name__ == expected
    same = [refusal.code for refusal in registry.load("sdpa_efficient").refusals(replace(problem_of(), **changes))]
    assert same == ([] if expected == "CudaFlash" else ["same_kernel"])


@pytest.mark.parametrize(
    ("active", "asked", "capability", "changes", "expected"),
    [
        ("FA3", "FA3", HOPPER, {}, ""),
        ("FA3", "FA3", HOPPER, {"deterministic": True}, "FA3 has no deterministic backward pass"),
        ("FA3", "FA3", AMPERE, {}, "FA3 needs compute capability 9.0 or higher, cuda:0 has 8.0"),
        ("FA3", "FA3", BLACKWELL, {}, "FA3 needs compute capability 9.0 or lower, cuda:0 has 10.0"),
        ("FA4", "FA4", HOPPER, {}, "is replaced by FA4 in PyTorch, which the backend flash may run"),
        ("FA3", "", HOPPER, {}, "is FA3 in this process, not PyTorch's own"),
        (None, "FA3", HOPPER, {}, "is PyTorch's own in this process, not FA3"),
        ("FA3", "", HOPPER, {"dtype": F32}, "computes in bfloat16, float16, not float32"),
    ],
    ids=str,
)
def test_what_takes_the_place_of_pytorchs_flash_kernel(
    active: str | None, asked: str, capability: Any, changes: Any, expected: str, device: Any, monkeypatch: Any
) -> None:
    """`sdpa` then runs its memory-efficient kernel where that has other limits."""
    device(capability)
    monkeypatch.setattr(limits, "current_flash", lambda: active)
    problem = replace(problem_of(flash_kernel=asked), **changes)
    kernel, _, _ = backend._prepared(sdpa.BACKEND, problem)
    assert type(kernel).__name__ == ("CudaEfficient" if expected else "CudaFlash")
    found = [str(refusal)[: len(expected)] for refusal in CUDA_FLASH.refusals(problem)]
    assert found == ([expected] if expected else [])


# --- texts of refusals ------------------------------------------------------------------------------------------------

GAP = "to 224 on compute capability 8.9, asked for 192, and one more for the gradient of lse"
REASONS: list[tuple[str, tuple[int, int], Problem, list[str]]] = [
    (
        *("sdpa", TURING, problem_of(BF16)),
        [
            "flash: needs compute capability 8.0 or higher, cuda:0 has 7.5",
            "memory-efficient: needs compute capability 8.0 or higher for bfloat16, cuda:0 has 7.5",
        ],
    ),
    ("sdpa", HOPPER, problem_of(F16, Window(3, 0)), ["computes Dense, Dilated, not Window(left=3, right=0)"]),
    ("sdpa", HOPPER, problem_of(has_key_mask=True), ["takes no mask, which seq_lens and key_mask need"]),
    (
        *("sdpa", HOPPER, problem_of(F32, has_seq_lens=True)),
        ["flash: computes in bfloat16, float16, not float32", "takes no mask, which seq_lens and key_mask need"],
    ),
    ("sdpa_efficient", HOPPER, problem_of(has_key_mask=True), []),
    ("sdpa_efficient", HOPPER, problem_of(F32, has_seq_lens=True), []),
    (
        *("sdpa_efficient", (8, 9), problem_of(head_dim=192, return_lse=True)),
        [f"sdpa runs this kernel here, since PyTorch's flash kernel has no backward pass for a head_dim of 193 {GAP}"],
    ),
    (
        *("sdpa_efficient", HOPPER, problem_of(head_dim=320)),
        ["sdpa runs this kernel here, since PyTorch's flash kernel takes a head_dim up to 256, not 320"],
    ),
    (
        *("sdpa_cudnn", PASCAL),
        problem_of(F32, Window(3, 0), head_dim=136, has_seq_lens=True, deterministic=True, dropout_p=0.25, ranks=2),
        [
            "runs on one rank, the sequence is sharded over 2",
            "needs compute capability 8.0 or higher, cuda:0 has 6.1",
            "computes in bfloat16, float16, not float32",
            "takes a head_dim up to 128, not 136",
            "has no deterministic backward pass",
            "takes no mask, which seq_lens and key_mask need",
            "computes Dense, Dilated, not Window(left=3, right=0)",
        ],
    ),
    ("sdpa_cudnn", (13, 0), problem_of(), ["needs compute capability 12.1 or lower, cuda:0 has 13.0"]),
    (
        *("sdpa_cudnn", HOPPER, problem_of(F16, Dilated((32, 127), (1, 2)), q_len=129, k_len=129)),
        ["takes 2 keys or more, a part of the pattern has 1"],
    ),
    (
        *("sdpa_cudnn", HOPPER, problem_of(head_dim=128, return_lse=True)),
        ["takes a head_dim up to 128, not 128, and one more for the gradient of lse"],
    ),
    (
        *("sdpa_mask", TURING, problem_of(BF16, Window(3, 0))),
        ["needs compute capability 8.0 or higher for bfloat16, cuda:0 has 7.5"],
    ),
    (
        *("sdpa_float32", HOPPER, problem_of(F32)),
        ["widens float16 and bfloat16 to float32, float32 is not half precision"],
    ),
    (
        *("sdpa_efficient", HOPPER),
        problem_of(F16, Dilated((8,), (1,)), q_len=8 * 65536, k_len=8 * 65536, batch=1, heads=1, kv_heads=1),
        ["takes 65535 batch rows at once, the pattern's segments make 65536"],
    ),
]


@pytest.mark.parametrize(("name", "capability", "problem", "expected"), REASONS)
def test_a_refusal_has_every_reason(
    name: str, capability: tuple[int, int], problem: Problem, expected: list[str], device: Callable[..., None]
) -> None:
    device(capability)
    assert texts(name, problem) == expected


def test_an_old_cudnn(device: Callable[..., None]) -> None:
    device(HOPPER, cudnn=8907)
    assert texts("sdpa_cudnn", problem_of()) == ["needs cuDNN 90000 or newer, this PyTorch has 8907"]
    assert sdpa_cudnn.version() == f"{torch.__version__} cuDNN 8907"


def test_a_missing_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for name in ("sdpa_efficient", "sdpa_cudnn"):
        assert "cuda:0 is not there" in texts(name, problem_of())


@pytest.mark.parametrize("head_dim", [64, 200])
def test_what_runs_on_rocm(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever compares with NVIDIA's capabilities is left out, or does not ask for AMD's."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: pytest.fail("AMD's capability was asked"))
    monkeypatch.setattr("torch.version.hip", "6.2")
    problem = replace(problem_of(), head_dim=head_dim)
    refused = {name: texts(name, problem) for name in (*registry.BUILT_IN, "manual")}
    served = {name for name, why in refused.items() if not any("ROCm" in each or "runs on cpu" in each for each in why)}
    assert served == {"sdpa", "sdpa_efficient", "sdpa_float32", "sdpa_mask", "tiles", "flex", "manual"}
    assert type(sdpa.BACKEND.kernel(problem)) is CudaFlash
    assert type(sdpa.BACKEND.kernel(replace(problem, dtype=F32))) is CudaEfficient
    assert registry.preference("rocm-gfx942-304cu", problem.to_dict()) == registry.BUILT_IN
    assert "is not measured on ROCm, and this PyTorch has ROCm 6.2" in refused["triton"]


CPU = Limits("cpu", dict.fromkeys(DTYPES, ANY), masks=True)  #: limits that no backend uses start from it


def on_cpu(dtype: torch.dtype = F16, **changes: Any) -> Problem:
    return problem_of(dtype, device=torch.device("cpu"), **changes)


@pytest.mark.parametrize(
    ("limits", "changes", "expected"),
    [
        (CPU._replace(platforms=("plan9",)), {}, [f"runs on plan9, not {sys.platform}"]),
        (CPU._replace(platforms=("plan9", sys.platform)), {}, []),
        (CPU._replace(repeatable_head_dim=32), {}, []),
        (
            CPU._replace(repeatable_head_dim=32),
            {"deterministic": True},
            ["has no deterministic backward pass past a head_dim of 32"],
        ),
        (CPU._replace(repeatable_head_dim=0), {"deterministic": True, "needs_grad": False}, []),
        (CPU._replace(dtypes=dict.fromkeys(HALF, ANY)), {"dtype": F64}, ["computes in bfloat16, float16, not float64"]),
    ],
    ids=str,
)
def test_limits(limits: Limits, changes: dict[str, Any], expected: list[str]) -> None:
    found = Variant(limits, lambda problem: CpuFlash()).refusals(replace(on_cpu(), **changes))
    assert [refusal.text for refusal in found] == expected


# --- packages ---------------------------------------------------------------------------------------------------------


def package(**changes: Any) -> Package:
    return Package("abacus", "pip install abacus", "abacus", (1, 2))._replace(**changes)


def of_package(package: Package | None, *, title: str = "", limits: Limits = CPU) -> Variant:
    return Variant(limits, lambda problem: CpuFlash(), title, package)


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Makes these distributions, and no others, appear installed; their modules are missing."""

    def distribution(name: str) -> Any:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=versions[name], read_text=lambda file: None)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    found = Branched("", (of_package(package()),), package().version).refusals(problem_of(has_key_mask=True))
    assert [(refusal.code, refusal.text) for refusal in found] == [
        ("not_installed", "package abacus is not installed (pip install abacus)"),
        ("device", "runs on cpu, not cuda"),
    ]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        package().version()


@pytest.mark.parametrize("version", ["0.9", "1", "1.1.9+cu128", "1.1rc3", "unknown"])
def test_an_old_package(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"abacus": version})
    (found,) = of_package(package()).refusals(on_cpu())
    assert found.code == "not_installed"
    assert found.text == f"package abacus is {version}, needs 1.2 or newer (pip install abacus)"


@pytest.mark.parametrize("version", ["1.2", "1.2.0b3", "1.10", "2"])
def test_a_package_is_imported_last(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import takes seconds and memory: it is skipped for a problem with other refusals."""
    installed(monkeypatch, {"abacus": version})
    monkeypatch.delitem(sys.modules, "abacus", raising=False)
    assert [refusal.code for refusal in of_package(package()).refusals(problem_of(F16))] == ["device"]
    (found,) = of_package(package()).refusals(on_cpu())
    assert found.code == "not_installed"
    assert found.text == "package abacus cannot be used: ModuleNotFoundError: No module named 'abacus'"


def test_an_unusable_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"abacus": "1.2"})
    monkeypatch.setitem(sys.modules, "abacus", ModuleType("abacus"))
    assert of_package(package()).refusals(on_cpu()) == []
    (found,) = of_package(package(fault=lambda module: f"{module.__name__} lacks beads")).refusals(on_cpu())
    assert found.text == "package abacus cannot be used: abacus lacks beads"


def test_refusals_of_installed_packages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"abacus": "2"})
    narrow = CPU._replace(head_dim=32, dtypes={F16: ANY})
    variants = (
        of_package(package(), title="two", limits=narrow),
        of_package(package(distribution="quipu"), title="one"),
        of_package(None, title="cuda", limits=CPU._replace(device="cuda", head_dim=16)),
        of_package(package(), title="three", limits=narrow._replace(head_dim=48)),
    )
    found = Branched("", variants).refusals(on_cpu(F32))
    assert [refusal.text for refusal in found] == [
        "two: computes in float16, not float32",
        "two: takes a head_dim up to 32, not 64",
        "three: computes in float16, not float32",
        "three: takes a head_dim up to 48, not 64",
        "one: package quipu is not installed (pip install abacus)",
    ]
    without = (*variants[:1], of_package(package(distribution="quipu"), limits=narrow), *variants[2:])
    assert [refusal.text for refusal in Branched("", without).refusals(on_cpu(F32))] == [
        "computes in float16, not float32",
        "two: takes a head_dim up to 32, not 64",
        "three: takes a head_dim up to 48, not 64",
    ]
    assert Branched("", (*variants, of_package(None))).refusals(on_cpu(F32)) == []


@pytest.mark.parametrize(
    ("changes", "allocated"),
    [
        ({"heads": 8, "kv_heads": 8, "q_len": 4096, "k_len": 4096}, 152),
        ({"heads": 1, "kv_heads": 1, "q_len": 16384, "k_len": 16384, "head_dim": 128}, 1072),
    ],
)
def test_deterministic_gradients_of_sdpa(changes: dict[str, Any], allocated: int, device: Callable[..., None]) -> None:
    """PyTorch's flash kernel allocates a float32 dq for each processor, in MiB here, on an H100."""
    device(HOPPER)
    problem = problem_of(deterministic=True, **changes)
    announced, least = sdpa.workspace_bytes, allocated * 2**20
    assert announced(problem) >= max(least, 1.2 * announced(replace(problem, deterministic=False)))
