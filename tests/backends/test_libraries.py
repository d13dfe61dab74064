"""The adapters of other libraries and of PyTorch's CUDA ops, with fake ones on the CPU: out, lse, gradients."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch import attend
from attn_dispatch.backends import flash, sdpa, sdpa_cudnn, sdpa_efficient, sdpa_float32, xformers
from attn_dispatch.calls import packing
from attn_dispatch.errors import BackendFailed, InvalidInput
from attn_dispatch.kernels import dense, registry
from attn_dispatch.kernels.branches import backend as branched
from attn_dispatch.kernels.branches import flash4 as flash4_package
from attn_dispatch.kernels.branches import hub
from attn_dispatch.kernels.branches import run as branches
from attn_dispatch.kernels.branches.backend import Branched, Variant
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.dense import CpuFlash, DenseCall
from attn_dispatch.kernels.limits import ANY
from attn_dispatch.machine import environment
from attn_dispatch.settings import FLASH_KERNEL, cache_folder
from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.testing import optional
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.testing.checks import _OrderCheck
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import HardCase, case_of
from attn_dispatch.tuning.hard_cases import class_key
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_limits import installed
from tests.support import libraries
from tests.support.cases import factors_of, failures, gate
from tests.support.pairwise import by_turns, crossed, thinned

FLASH = {variant.title: variant for variant in flash.BACKEND.variants}
ADAPTERS = {
    "flash2": FLASH["flash-attn 2"],
    "flash3": FLASH["flash-attn 3"],
    "flash4": FLASH["flash-attn 4 on Hopper"],
    "xformers": xformers.BACKEND.variants[0],
    "cudnn": sdpa_cudnn.BACKEND.variants[0],
    "cudnn-before-2.9": sdpa_cudnn.BACKEND.variants[0],
    "torch-flash": sdpa.BACKEND.variants[1],
    "efficient": sdpa_efficient.BACKEND.variants[0],
    "float32-efficient": sdpa_float32.BACKEND.variants[1],
}
DTYPES = (torch.float32, torch.float16)
IDS = (
    *("dense", "dense-odd-head-dim", "dense-grouped", "dense-cross", "dense-expanded", "dense-head-dim-not-last"),
    *("causal", "causal-few-tokens", "causal-rows-without-keys", "scale-given", "large-scores"),
    *("longnet-causal", "longnet-ragged", "longnet-ragged-causal", "longnet-grouped", "longnet-grouped-uneven"),
    *("longnet-odd-heads", "longnet-packed", "longnet-head-dim-not-last", "longnet-split"),
    *("segments-alone-causal-grouped", "rate-not-dividing-causal", "uncovered-rows"),
    *("dense-key-mask", "causal-both-masks", "longnet-key-mask", "longnet-seq-lens", "longnet-both-masks"),
    *("window-causal", "window-both-sides", "window-ahead", "window-rows-without-keys"),
)
CHOSEN = [case for case in CASES if case.id in IDS]
FEW = [case for case in CHOSEN if case.id in ("dense-odd-head-dim", "causal", "longnet-ragged-causal", "window-causal")]
NEWEST = {"flash-attn-4": "4.0.0b36", "flash_attn_3": "3.0.0", "flash-attn": "2.8.3", "xformers": "0.0.35"}


@pytest.fixture(autouse=True)
def newest(one_thread: None, unknown_packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest libraries are installed, and nothing is known of them."""
    installed(monkeypatch, NEWEST)


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Installs the fake library of the test's `adapter`; the list holds the arguments of its backward passes, and
    how many parts of the keys the forward passes of flash-attn 3 were to make.
    """
    adapter: str = request.getfixturevalue("adapter")
    seen: list[dict[str, Any]] = []
    context: Any = nullcontext()
    if adapter == "flash2":
        libraries.flash_attn_2(monkeypatch, seen)
    elif adapter == "flash3":
        context = libraries.flash_attn_3(monkeypatch, seen)
    elif adapter == "flash4":
        libraries.flash_attn_4(monkeypatch, seen)
    elif adapter == "xformers":
        libraries.xformers(monkeypatch, seen)
    elif adapter.startswith("cudnn"):
        _replace_ops(sdpa_cudnn, libraries.cudnn_ops(3 if "before" in adapter else 4), monkeypatch)
        monkeypatch.setattr(dense, "VERSION", (2, 8) if "before" in adapter else (2, 9))
    else:
        ops = libraries.flash_ops() if adapter == "torch-flash" else libraries.efficient_ops()
        _replace_ops(dense, ops, monkeypatch)
    with context:
        yield seen


def _replace_ops(module: Any, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "aten", ops)
    monkeypatch.setattr(module, "binding", lambda name: getattr(ops, name))


def on_cpu(variant: Variant) -> Branched:
    """A backend of one kernel on the CPU, for any dtype."""
    limits = variant.limits._replace(device="cpu", dtypes=dict.fromkeys(DTYPES, ANY), platforms=(), backward_multiple=1)
    return Branched("adapter", (variant._replace(limits=limits),))


def agrees(adapter: str, case: Case, dtype: torch.dtype, needs_grad: bool) -> None:
    backend, asked = on_cpu(ADAPTERS[adapter]), case.problem(dtype, needs_grad=needs_grad)
    for problem in (asked, replace(asked, return_lse=False)):
        if not backend.refusals(problem):
            assert failures(backend, problem) == ()
    if (packed := optional.problem_of_documents(backend, problem)) is not None:
        assert optional.documents_failures(backend, packed) == []


@pytest.mark.parametrize("adapter", ["flash2", "flash3", "flash4", "xformers", "torch-flash"])
@pytest.mark.parametrize("most", [24, 23])
def test_documents_are_one_call(
    adapter: str, most: int, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each pass, in rows that are alike and others, unless they are more than a grid holds."""
    monkeypatch.setattr(packing, "LARGEST_GRID", most)
    monkeypatch.setattr(registry, "load", lambda name: on_cpu(ADAPTERS[adapter]))
    q, k, v = (torch.randn(2, 12, heads, 16, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    for ids in (torch.arange(12) // 5, torch.tensor([[0] * 11 + [1], [2] * 12]), torch.arange(12)):
        out = attend(q, k, v, documents=ids.expand(2, 12), is_causal=True, backend="flash")
        torch.autograd.grad(out.sum(), (q, k, v))
    documents = [each["documents"] for each in calls if "documents" in each]
    assert documents == ([] if adapter == "torch-flash" else [6, 6, 3, 3, 24, 24] if most == 24 else [6, 6, 3, 3])


@pytest.mark.parametrize("adapter", ["flash2", "cudnn", "torch-flash", "efficient"])
def test_what_a_forward_pass_drew_goes_to_the_backward_pass(adapter: str, calls: list[dict[str, Any]]) -> None:
    """Dropout of one call of the kernel; of no part of a pattern, and not beside a gradient of lse."""
    backend, computed = on_cpu(ADAPTERS[adapter]), 0
    some = "dense-grouped", "causal", "window-causal", "dense-key-mask", "longnet-causal"
    for case in [case for case in CASES if case.id in some]:
        plain = replace(case.problem(torch.float16, needs_grad=True), return_lse=False)
        problem = replace(plain, dropout_p=0.3)
        if backend.refusals(plain):
            continue
        refused = [each.text for each in backend.refusals(replace(problem, return_lse=True))]
        assert "has no gradient of lse with dropout" in " ".join(refused)
        found = backend.refusals(problem)
        if case.id == "longnet-causal" or (adapter == "efficient" and case.id == "dense-grouped"):
            text = "drops weights in one call of the kernel, which has not all of this pattern"
            assert found == [("dropout", text)]
        else:
            assert not found
            assert _OrderCheck(backend, "natural", problem, set()).dropout() == []
            computed += 1
        assert not backend.takes_documents(problem)
    assert computed == (3 if adapter == "flash2" else 2)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_specialized_calls_give_the_bits_of_run(adapter: str, case: Case, calls: list[dict[str, Any]]) -> None:
    backend, problem = on_cpu(ADAPTERS[adapter]), case.problem(torch.float16, needs_grad=False)
    if not backend.refusals(problem):
        assert optional.specialized_failures(backend, problem) == []
    if case.id == "causal":
        example = make(problem)
        made = backend.specialized(problem, example.q, example.k, example.v)
        assert (made is None) == (adapter == "float32-efficient")  # it is bound for all others


@pytest.mark.parametrize("kernel", [dense.CudaFlash(), dense.CudaEfficient(), sdpa_cudnn.Cudnn()])
@pytest.mark.parametrize("heads_first", [False, True])
def test_training_by_the_formula_of_an_op(kernel: dense.Kernel, heads_first: bool) -> None:
    """PyTorch's own ops, of tensors without data: its formula takes a gradient as it comes, and keeps none of q."""
    problem = replace(CHOSEN[0].problem(torch.float16, needs_grad=True), return_lse=False)
    x = torch.randn(1, 2, 8, 16, dtype=torch.float16, device="meta", requires_grad=True)
    call: Any = kernel.specialized(x, x, x, False, 1.0, heads_first)
    assert call is not None
    seen: list[torch.Tensor] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(args[:2] if "attention_backward" in str(op) else ())
            return op(*args, **(kwargs or {}))

    with Seen():  # type: ignore[no-untyped-call]
        out = call(x, x, x, problem)
        misaligned = torch.empty(out.numel() + 1, dtype=out.dtype, device="meta")[1:].view(out.shape)
        (first,) = torch.autograd.grad(out, x, misaligned, create_graph=True)
    grad, q = seen
    assert grad.storage_offset() % 8 == 0
    assert kernel.masks or grad.stride() == q.stride()
    with pytest.raises(BackendFailed, match="no second derivatives"):
        torch.autograd.grad(first.sum(), x)
    y = x * 1
    freed = weakref.ref(y)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda packed: x):
        out = call(y, x, x, problem)
    del y
    assert (freed(), out.requires_grad) == (None, True)


@crossed(lambda adapter, case: {**factors_of(case), "adapter": adapter}, adapter=ADAPTERS, case=CHOSEN)
def test_adapters_agree_with_float64(adapter: str, case: Case, calls: list[dict[str, Any]]) -> None:
    agrees(adapter, case, torch.float32, True)


@by_turns(("adapter", "case"), ADAPTERS, FEW, lambda x: getattr(x, "id", x))
def test_adapters_in_half_precision_and_without_gradients(
    adapter: str, case: Case, calls: list[dict[str, Any]]
) -> None:
    agrees(adapter, case, torch.float16, True)
    agrees(adapter, case, torch.float16, False)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_refuse_only_the_unsupported(adapter: str, calls: list[dict[str, Any]]) -> None:
    backend = on_cpu(ADAPTERS[adapter])
    refused = {case.id: backend.refusals(case.problem(torch.float16, needs_grad=True)) for case in CHOSEN}
    windows = {case.id for case in CHOSEN if isinstance(case.pattern, Window)}
    masked = {case.id for case in CHOSEN if case.seq_lens or case.key_mask}
    sinks = {case.id for case in CHOSEN if isinstance(case.pattern, Window) and case.pattern.sinks}
    expected = sinks if adapter.startswith("flash") else windows
    expected |= set() if "efficient" in adapter else masked
    # A tail of one token.
    expected |= {"rate-not-dividing-causal"} if adapter.startswith("cudnn") else set()
    assert {name for name, reasons in refused.items() if reasons} == expected


@pytest.mark.parametrize("adapter", ["flash2", "flash3", "flash4", "xformers"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_other_libraries_refuse_tangents(adapter: str, needs_grad: bool, calls: list[dict[str, Any]]) -> None:
    """Their own operators drop them without a word."""
    problem = CHOSEN[0].problem(torch.float16, needs_grad=needs_grad)
    example = make(problem)
    q, k, v = example.q, example.k, example.v
    forward_ad: Any = torch.autograd.forward_ad
    backend = on_cpu(ADAPTERS[adapter])
    special = None if needs_grad else backend.specialized(problem, q, k, v)
    for run in (backend.run, special or backend.run):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"forward.mode"):
            run(q, k, forward_ad.make_dual(v, torch.ones_like(v)), problem)


@pytest.mark.parametrize("imported", ["flash_attn_cuda", "flash_attn_gpu"])
def test_the_extension_of_flash_2(imported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.flash_attn_2(monkeypatch, [], imported)
    agrees("flash2", FEW[1], torch.float16, True)


def test_a_build_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.flash_attn_2(monkeypatch, [])
    kernels = sys.modules["flash_attn.flash_attn_interface"].flash_attn_gpu
    libraries.modules(
        monkeypatch, flash_attn={}, flash_attn__flash_attn_interface={}, operators_of_the_hub={"ops": kernels}
    )
    folder = tmp_path / "flash-attn3/models--kernels--flash-attn2/snapshots/0123456789abcdef/build/torch211"
    monkeypatch.setenv(FLASH_KERNEL, str(folder))
    with pytest.raises(InvalidInput, match=f"{FLASH_KERNEL} must be a folder with _ops.py, .*, got '{folder}'"):
        hub.build("flash_attn2")
    folder.mkdir(parents=True)
    (folder / "_ops.py").write_text("from operators_of_the_hub import ops")
    build = hub.build("flash_attn2")
    assert build is not None
    assert (hub.build("flash_attn3"), build.refusals(), build.version()) == (None, [], "of the Hub @ 0123456789ab")
    monkeypatch.setattr(flash, "PACKAGE2", build)
    agrees("flash2", FEW[1], torch.float16, True)


@pytest.mark.parametrize("adapter", ["flash2", "flash3", "flash4"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_arguments_of_flash(adapter: str, deterministic: bool, calls: list[dict[str, Any]]) -> None:
    case = Case("", Window(5, None), (1, 40, 2, 16))
    problem = replace(case.problem(torch.float16, needs_grad=True), deterministic=deterministic)
    assert failures(on_cpu(ADAPTERS[adapter]), problem) == ()
    backward = [each for each in calls if "deterministic" in each]
    assert backward == [{"deterministic": deterministic, "window": (5, None) if adapter == "flash4" else (5, -1)}]


@crossed(
    adapter=("flash2", "flash3", "flash4"),
    pattern=(Dense(), Dense(is_causal=True), Window(5, None), Window(40, 0), Window(None, 1)),
    q_len=(1, 20, 70),
    heads=((4, 2), (2, 2)),
    scale=(None, -0.3),
)
def test_flash_takes_key_lens(
    adapter: str, pattern: Pattern, q_len: int, heads: tuple[int, int], scale: float | None,
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The newer generations of more queries alone. A row's first queries may have no keys."""
    monkeypatch.setattr(flash, "BACKEND", on_cpu(ADAPTERS[adapter]))
    monkeypatch.setattr(flash, "refusals", flash.BACKEND.refusals)
    monkeypatch.setattr(flash, "is_noted", lambda *given: True)
    case = Case("", pattern, (1, q_len, heads[0], 20), k_len=60, kv_heads=heads[1], scale=scale)
    backend = registry.load("flash")
    rows = optional.problem_of_key_lens(backend, case.problem(torch.float16, needs_grad=True))
    assert (rows is None) == (q_len == 1 and adapter != "flash2")
    assert rows is None or optional.key_lens_failures(backend, rows) == []


@pytest.mark.parametrize("results", [5, 8])
def test_flash_3_of_builds_that_ignore_deterministic(results: int, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ", Tensor" * (results - 5)
    monkeypatch.setattr(libraries, "FLASH_3_BWD", f"{libraries.FLASH_3_BWD[:-1]}{more})")
    installed(monkeypatch, {"flash_attn_3": "3.0.0"})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    problem = Case("", Dense(), (1, 40, 4, 64)).problem(torch.bfloat16, needs_grad=True, device="cuda:0")
    with libraries.flash_attn_3(monkeypatch, []):
        found = [flash.refusals(replace(problem, deterministic=each)) for each in (False, True)]
    assert [bool(each) for each in found] == [False, results == 8]
    assert results == 5 or "may have no deterministic backward pass" in str(found[1])


@pytest.mark.parametrize("adapter", ["flash3"])
@pytest.mark.parametrize(("rows", "parts"), [(80, 0), (79, 1)])
def test_flash_3_splits_the_keys_of_few_queries(
    adapter: str, rows: int, parts: int, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "SPLIT_ROWS", rows)
    problem = Case("", Dense(), (1, 40, 2, 16)).problem(torch.float16, needs_grad=True)
    gate(problem).run(on_cpu(ADAPTERS[adapter]))
    assert calls[0] == {"num_splits": parts}


def test_the_sums_of_keys_split_by_flash_3_fit_into_declared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: flash-attention, hopper: num_splits_heuristic (heuristics.h), get_num_splits (flash_api.cpp)."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    variant = ADAPTERS["flash3"]
    shapes = [(1, 1, 32, 8), (1, 4096, 2, 2), (1, 1024, 8, 8), (1, 4096, 2, 1), (3, 2048, 1, 1), (8, 16, 64, 8)]
    splits = set()
    for (batch, q_len, heads, kv_heads), head_dim, k_len in product(shapes, (64, 128, 256), (700, 4000, 60000)):
        case = Case("", Dense(), (batch, q_len, heads, head_dim), kv_heads=kv_heads, k_len=k_len)
        problem = case.problem(torch.bfloat16, needs_grad=False, device="cuda:0")
        rows, columns = (192, 192) if head_dim == 64 else (128, 176) if head_dim == 128 else (128, 80)
        tiles = batch * kv_heads * math.ceil(q_len * heads / kv_heads / rows)
        parts = range(1, 1 + min(128, 132, math.ceil(k_len / columns)))
        used = [tiles * each / 132 / math.ceil(tiles * each / 132) for each in parts]
        found = next(each for each, share in zip(parts, used) if share >= 0.85 * max(used))
        found = 1 if tiles >= 0.8 * 132 or parts[-1] <= 4 else found
        splits.add(found)
        assert batch * q_len * heads <= flash.SPLIT_ROWS
        needed = 4 * found * batch * q_len * heads * (head_dim + 1)
        kernel = variant.kernel(problem)
        assert needed <= branches.workspace_bytes(problem, variant.plan(problem, kernel), kernel)
    assert len(splits) > 5


@pytest.mark.parametrize(
    ("capability", "there", "expected"),
    [
        ((8, 0), NEWEST, "Flash2"),
        ((9, 0), NEWEST, "Flash4OfBoth"),
        ((9, 0), ("flash_attn_3", "flash-attn"), "Flash3"),
        ((9, 0), ("flash-attn",), "Flash2"),
        ((10, 0), NEWEST, "Flash4OfBoth"),
        ((12, 0), NEWEST, "Flash2"),
        ((12, 0), ("flash-attn-4",), "Flash4OfBoth"),
    ],
    ids=str,
)
def test_the_newest_generation_that_fits(
    capability: tuple[int, int], there: Collection[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.flash_attn_2(monkeypatch, [])
    libraries.modules(monkeypatch, flash_attn_3={}, flash_attn_3___C={})
    libraries.modules(monkeypatch, flash_attn__cute={}, flash_attn__cute__interface={})
    installed(monkeypatch, {name: version for name, version in NEWEST.items() if name in there})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr("sys.platform", "linux")
    problem = replace(CHOSEN[0].problem(torch.bfloat16, needs_grad=True, device="cuda:0"), head_dim=64)
    assert flash.refusals(problem) == []
    kernel, _, scratch = branched._prepared(flash.BACKEND, problem)
    assert type(kernel).__name__ == expected
    assert scratch > 0
    if expected != "Flash3":  # its ops are not there
        q = torch.empty(problem.batch, problem.q_len, problem.heads, problem.head_dim, dtype=problem.dtype)
        compiles = expected == "Flash4OfBoth"
        assert (flash.specialized(problem, q, q, q) is None) == compiles == (flash.first_call_ms(problem) > 0)
        monkeypatch.setattr(flash, "is_noted", lambda *given: True)
        assert flash.specialized(problem, q, q, q) is not None
    assert flash.version() == ", ".join(
        f"{name} {version}" for name, version in NEWEST.items() if name in there and name != "xformers"
    )


OF_SDPA = ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_float32", "sdpa_mask")
OF_TORCH = (*OF_SDPA, "tiles", "flex", "flex_flash", "manual", "xformers")
SURROUNDINGS = {"torch": "2.13.0", "triton": "3.9.0", "active": None, "cudnn": 91501, "interpreter": "0", **NEWEST}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((each, {"torch": "9.9"}) for each in OF_TORCH),
        ("flash", {"flash-attn-4": "4.0.0b37"}),
        ("flash", {"flash_attn_3": "3.0.1"}),
        ("flash", {"flash-attn": "2.8.4"}),
        ("xformers", {"xformers": "0.0.36"}),
        ("xformers", {"flash-attn": "2.8.4"}),
        ("xformers", {"flash_attn_3": "3.0.1"}),
        ("xformers", {"active": "FA3"}),
        ("sdpa", {"active": "FA3"}),
        ("sdpa", {"active": "FA4", "flash-attn-4": "4.0.0b37"}),
        ("sdpa_cudnn", {"cudnn": 92400}),
        ("flex", {"triton": "9.9"}),
        ("flex_flash", {"flash-attn-4": "4.0.0b37"}),
        ("triton", {"triton": "9.9"}),
        ("triton_tiles", {"interpreter": "1"}),
    ],
    ids=str,
)
def test_a_version_names_all_that_runs(name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def version(**changes: Any) -> str | None:
        made.update(SURROUNDINGS | changes)
        environment.installed.cache_clear()
        return registry.version_of(registry.load(name))

    installed(monkeypatch, made)
    monkeypatch.setattr("importlib.metadata.version", made.__getitem__)
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: made["cudnn"])
    monkeypatch.setattr(branched, "current_flash", lambda: made["active"])
    found = []
    for changes in ({}, *({key: change[key] for key in list(change)[:n]} for n in range(1, len(change) + 1))):
        with monkeypatch.context() as patch:
            patch.setattr("torch.__version__", (SURROUNDINGS | changes)["torch"])
            patch.setenv("TRITON_INTERPRET", (SURROUNDINGS | changes)["interpreter"])
            found.append(version(**changes))
    assert len({*found}) == len(found)
    assert version() is not None


def test_a_version_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 3 is built from a repository, where its number stays the same."""
    origin = '{"url": "https://example.org", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}'
    there = SimpleNamespace(version="3.0.0", read_text={"direct_url.json": origin}.get)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: there)
    assert "flash_attn_3 3.0.0 @ 0123456789ab," in flash.version()


@pytest.fixture
def flash4(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The refusals of `flash` on a device of a capability, where flash-attn 4 alone is installed."""
    libraries.modules(monkeypatch, flash_attn__cute={}, flash_attn__cute__interface={})
    installed(monkeypatch, {"flash-attn-4": NEWEST["flash-attn-4"]})
    monkeypatch.setattr("sys.platform", "linux")

    def refusals(capability: tuple[int, int], pattern: Pattern, head_dim: int, **changes: Any) -> list[str]:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        problem = Case("", pattern, (1, 40, 2, head_dim)).problem(torch.bfloat16, needs_grad=True, device="cuda:0")
        return [refusal.text for refusal in flash.refusals(replace(problem, **changes))]

    return refusals


def test_what_flash_4_takes(flash4: Callable[..., list[str]]) -> None:
    causal, window = Dense(True), Window(5, 0)
    for capability in ((9, 0), (10, 0), (11, 0), (12, 0), (12, 1)):  # no column for the gradient of lse
        assert flash4(capability, window, 128, return_lse=True) == []
    assert flash4((9, 0), window, 256, return_lse=True) == []
    assert "flash-attn 4 on Hopper: has a backward pass for multiples of 32, not a head_dim of 80" in (
        flash4((9, 0), causal, 80)
    )
    assert flash4((9, 0), causal, 80, needs_grad=False) == flash4((10, 0), causal, 80) == []
    assert flash4((10, 0), causal, 256, return_lse=False, deterministic=True) == []
    assert flash4((10, 0), causal, 136, return_lse=False) != []
    assert flash4((10, 0), causal, 256, return_lse=True) != []
    assert flash4((10, 0), window, 256, return_lse=False) != []
    assert flash4((12, 0), causal, 64, deterministic=True) != []
    assert flash4((12, 0), causal, 256, return_lse=False) != []


BLOCKS = BlocksForm((256, 128), "heads", by_row=True, is_list=False, within=Dense(), density=-2)


@thinned(
    ("heads", "capability", "size"),
    [("all", (9, 0), (128, 128)), ("kv_heads", (9, 0), (384, 256)), ("heads", (10, 0), (256, 128))],
    2,
)
@pytest.mark.parametrize("adapter", ["flash4"])
def test_flash_4_over_blocks(
    adapter: str,
    heads: str,
    capability: tuple[int, int],
    size: tuple[int, int],
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged last blocks, queries without a block, keys that no query sees and that hold NaN."""
    backend = adapted(flash)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *device: capability)
    on_this = replace(on_cpu(flash.OVER_BLOCKS.variants[0]), also=flash4_package.refuse_blocks)
    monkeypatch.setattr(flash, "OVER_BLOCKS", on_this)
    form = replace(BLOCKS, size=size, heads=heads, by_row=heads != "all")
    problem = Case("", form, (2, 400, 4, 16), k_len=600, kv_heads=2).problem(torch.float16, needs_grad=False)
    changed = problem, replace(problem, scale=-0.5), replace(problem, return_lse=False)
    assert [flash.refusals(each) for each in changed] == [[], [], []]
    own = [HardCase.of("itself", Oracle.of(make(each))) for each in changed]
    for each in (*own, *map(case_of, class_key(problem))):
        assert each.refused_by(backend) or each.check(each.run(backend)).failures == ()
    assert {each["blocks"] for each in calls} == {(size[0], 128)}


@pytest.mark.parametrize(
    ("capability", "changes", "why"),
    [
        ((9, 0), {"size": (64, 64)}, "needs blocks of 128 x 128 or multiples, not 64 x 64"),
        ((10, 0), {"size": (128, 128)}, "needs blocks of 256 x 128 or multiples, not 128 x 128"),
        ((9, 0), {"is_list": True}, "takes tables of blocks, not lists, in which a block may stand twice"),
        ((9, 0), {"within": Dense(True)}, "takes blocks alone, not within Dense(causal)"),
        ((8, 0), {}, "needs compute capability 9.0 or higher, cuda:0 has 8.0"),
        ((12, 0), {}, "needs compute capability 11.0 or lower, cuda:0 has 12.0"),
        ((9, 0), {}, ""),
        ((10, 0), {"size": (512, 256)}, ""),
    ],
)
def test_which_blocks_flash_4_takes(
    flash4: Callable[..., list[str]], capability: tuple[int, int], changes: dict[str, Any], why: str
) -> None:
    form = replace(BLOCKS, **changes)
    assert flash4(capability, form, 128, needs_grad=False) == [why] * bool(why)
    assert "computes blocks without gradients" in flash4(capability, form, 128)


def test_flash_takes_no_intervals(flash4: Callable[..., list[str]]) -> None:
    assert flash4((9, 0), RangesForm(1, by_row=False), 64) == ["computes Blocks, not Ranges(1 per query)"]


@pytest.mark.parametrize("adapter", ["flash4"])
def test_flash_4_runs_on_the_device_of_its_tensors(
    adapter: str, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches on the current device."""
    entered: list[torch.device] = []

    def current_device(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(flash, "current_device", current_device)
    problem = FEW[0].problem(torch.float16, needs_grad=True)
    gate(problem).run(on_cpu(ADAPTERS[adapter]))
    assert entered == [torch.device("cpu")] * 2


@pytest.mark.parametrize("second", [(12, 0), (9, 0)])
def test_flash_4_on_several_gpus(second: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It remembers the capability of the first device that it runs on, which may not be that of the next."""
    current, capabilities = [0], [(9, 0), second]
    capability = lru_cache(lambda: capabilities[current[0]])
    libraries.modules(monkeypatch, flash_attn__cute={}, flash_attn__cute__interface={"_get_device_arch": capability})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(flash4_package, "_devices_differ", flash4_package._devices_differ.__wrapped__)
    for number in (0, 1):
        current[0] = number
        assert flash4_package.library()._get_device_arch() == capabilities[number]
    assert capability.cache_info().hits == (second == (9, 0))  # where all are alike, it is asked once


def test_flash_4_is_installed_for_the_cuda_of_pytorch() -> None:
    found = [flash4_package.hint(cuda) for cuda in (None, "12.9", "13.0", "13.2")]
    plain = "pip install 'attn-dispatch[flash4]'"
    assert found == [plain] * 2 + [f"{plain} 'flash-attn-4[cu13]'"] * 2


def test_the_cache_of_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (flash4_package.CACHE_ENABLED, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")

    def loaded() -> list[str | None]:
        monkeypatch.delitem(sys.modules, flash4_package.PACKAGE.module, raising=False)
        with pytest.raises(ImportError):
            flash4_package.PACKAGE.load()
        return [os.environ.get(name) for name in names]

    monkeypatch.setattr("platformdirs.user_cache_path", lambda *args, **kwargs: tmp_path)
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # restored after the test, whoever sets it
    assert loaded() == ["1", str(tmp_path / "flash-attn-4")]
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setenv(flash4_package.CACHE_ENABLED, "0")  # the user's choice
    assert loaded() == ["0", None]
    monkeypatch.delenv(flash4_package.CACHE_ENABLED)
    (tmp_path / "flash-attn-4").chmod(0o777)  # its files are executed
    assert loaded() == ["1", str(cache_folder() / "flash-attn-4")]
    for name in names:
        monkeypatch.delenv(name)
    for folder in (tmp_path, cache_folder()):
        (folder / "flash-attn-4").rmdir()
        (folder / "flash-attn-4").write_text("")
    assert loaded() == [None, None]


@pytest.mark.parametrize("adapter", ["torch-flash", "cudnn"])
def test_grouped_heads_are_not_copied(
    adapter: str, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: set[tuple[int, int]] = set()
    module = dense if adapter == "torch-flash" else sdpa_cudnn
    for name, real in vars(module.aten).items():

        def noted(*tensors: Any, real: Callable[..., Any] = real, first: int = "backward" in name, **rest: Any) -> Any:
            q, k = tensors[first : first + 2]
            heads.add((q.shape[1], k.shape[1]))
            return real(*tensors, **rest)

        monkeypatch.setattr(module.aten, name, noted)
    problem = Case("", Dense(), (1, 40, 4, 16), kv_heads=2).problem(torch.float16, needs_grad=True)
    gate(problem).run(on_cpu(ADAPTERS[adapter]))
    assert heads == {(4, 2)}


def test_xformers_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xformers.ops` fails beside a flash_attn without its interface; `xformers` does not."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    problem = FEW[0].problem(torch.float16, needs_grad=True, device="cuda:0")
    libraries.xformers(monkeypatch, [])
    assert xformers.refusals(problem) == []
    branched._load_fault.cache_clear()
    found, shown = ImportError("built for another PyTorch"), ImportError("Could not load this library")
    shown.__cause__ = OSError("libcudart.so.12: cannot open shared object file")
    monkeypatch.setattr("xformers._has_cpp_library", False)
    for error, ending in ((found, "ImportError: built for another PyTorch"), (shown, "load it first, by ctypes")):
        monkeypatch.setattr("xformers._cpp_lib", SimpleNamespace(_cpp_library_load_exception=error), raising=False)
        text = xformers.refusals(problem)[0].text
        assert "its compiled part does not fit this PyTorch" in text
        assert text.endswith(ending)
        branched._load_fault.cache_clear()
    monkeypatch.delattr(sys.modules["xformers.ops"], "memory_efficient_attention_forward_requires_grad")
    assert "its attention is in package mslk, which is not installed" in xformers.refusals(problem)[0].text
    branched._load_fault.cache_clear()
    monkeypatch.delitem(sys.modules, "xformers.ops")
    assert "cannot be used: ModuleNotFoundError" in xformers.refusals(problem)[0].text


@pytest.mark.parametrize("distribution", ["mslk", "mslk-cuda"])
def test_mslk_in_the_place_of_xformers(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's mslk 0.0.0 is a placeholder."""
    for version, expected in (("0.0.0", xformers.XFORMERS.distribution), ("1.3.0", distribution)):
        installed(monkeypatch, {distribution: version, "xformers": "0.0.36", "flash-attn": "2.8.3"})
        environment.installed.cache_clear()
        assert xformers.chosen().distribution == expected
    package = xformers.chosen()
    monkeypatch.setattr(xformers, "PACKAGE", package)
    assert xformers.version() == f"{distribution} 1.3.0 torch {torch.__version__} flash-attn 2.8.3"
    libraries.xformers(monkeypatch, [], "mslk__attention__fmha")
    backend = on_cpu(ADAPTERS["xformers"]._replace(package=package))
    problem = FEW[1].problem(torch.float16, needs_grad=True)
    assert backend.refusals(problem) == []
    assert failures(backend, problem) == ()


@pytest.mark.parametrize("shape", [(2, 40, 3, 16), (2, 40, 3, 9)], ids=str)
def test_cudnn_gets_out_in_the_cached_layout(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake op caches plans as PyTorch does, by q, k and v: out in another layout would be misread."""
    _replace_ops(sdpa_cudnn, libraries.cudnn_ops(4), monkeypatch)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(shape) for _ in range(4))
    kernel, call = sdpa_cudnn.Cudnn(), DenseCall(q, k, v, True, 0.3)
    out, lse = kernel.forward(call)
    first = kernel.backward(call, grad, out, lse)
    for turn in ((0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)):
        turned = [x.permute(turn).contiguous().permute(torch.tensor(turn).argsort().tolist()) for x in (grad, out)]
        again = kernel.backward(call, turned[0], turned[1], lse)
        assert all(torch.equal(one, other) for one, other in zip(first, again))


def test_float32_gradients_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    def backward(self: CpuFlash, call: DenseCall, *tensors: Any) -> tuple[torch.Tensor, ...]:
        seen.update(x.dtype for x in (*call, *tensors) if isinstance(x, torch.Tensor))
        return real(self, call, *tensors)

    real = CpuFlash.backward
    monkeypatch.setattr(CpuFlash, "backward", backward)
    for case in FEW:
        if isinstance(case.pattern, Window):
            continue
        assert failures(sdpa_float32.BACKEND, case.problem(torch.bfloat16, needs_grad=True)) == ()
    assert seen == {torch.float32}
