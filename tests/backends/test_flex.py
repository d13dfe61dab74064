"""The backend `flex`: refusals, caches, and kernels compiled on this machine.

test_conformance.py tests its arithmetic without the compiler.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import private
from attn_dispatch.backends import flex, flex_flash
from attn_dispatch.decisions import trial_limits
from attn_dispatch.dispatch import attend
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.flex import attention, requirements
from attn_dispatch.machine import environment
from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import Example, make, pattern_data
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_limits import installed
from tests.support import libraries
from tests.support.cases import failures
from tests.support.pairwise import thinned

FLEX = registry.load("flex")

LONGNET = Dilated((64, 128, 256), (1, 2, 4), is_causal=True)


def problem(pattern: Pattern = LONGNET, length: int = 256, **changes: Any) -> Problem:
    plain = Case("flex", pattern, (2, length, 4, 16)).problem(torch.float32, needs_grad=False)
    return replace(plain, **{"return_lse": False, **changes})


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


@pytest.fixture(autouse=True)
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of compiled kernels for these tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))


# --- refusals ---------------------------------------------------------------------------------------------------------


def codes(of: Problem) -> set[str]:
    return {refusal.code for refusal in flex.refusals(of)}


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"needs_grad": True}, "gradient", "its CPU kernel has no backward"),
        ({"return_lse": True}, "lse", "its CPU kernel returns no lse"),
        ({"dtype": torch.float64}, "dtype", "computes in bfloat16, float16, float32, not float64"),
        ({"dropout_p": 0.25}, "dropout", "has no dropout, asked for 0.25"),
        ({"ranks": 2}, "mesh", "runs on one rank, the sequence is sharded over 2"),
    ],
)
def test_refusals_on_a_cpu(changes: dict[str, Any], code: str, text: str) -> None:
    assert code not in codes(problem())
    assert text in map(str, flex.refusals(problem(**changes)))


def test_forcing_it_raises_its_refusals() -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with pytest.raises(NoBackend, match=r"flex: .*its CPU kernel has no backward"):
        attend(q, q, q, LONGNET, backend="flex")


def test_tables_of_long_sequences() -> None:
    """Their size is quadratic in the length: 1 GiB at a million tokens."""
    million = 2**20
    assert attention.block_table_bytes(problem(length=million)) == attention.TABLE_LIMIT
    assert attention.block_table_bytes(problem(Dense(), length=million)) == 0
    (refusal,) = (r for r in flex.refusals(problem(length=million + 1)) if r.code == "over_memory")
    assert refusal.text == f"{LONGNET} needs block tables of 1.0 GiB, over 1.0 GiB"
    split = replace(LONGNET, heads="split")
    assert attention.block_table_bytes(problem(split, length=million // 2)) == attention.TABLE_LIMIT


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"CXX": "no-such-compiler"}, "compiles its CPU kernel: no-such-compiler is not on the PATH, and $CXX is"),
        ({"CXX": "sh -m64"}, "takes a C++ compiler without arguments and launchers, and $CXX is 'sh -m64'"),
        ({"ATEN_CPU_CAPABILITY": "default"}, "which $ATEN_CPU_CAPABILITY=default turns off"),
    ],
)
def test_a_machine_that_cannot_compile(
    environment: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setattr(private, "has_avx2", lambda: True)
    for name, value in {"CXX": str(compiler), **environment}.items():
        monkeypatch.setenv(name, value)
    requirements._refusals.cache_clear()
    try:
        assert any(text in str(refusal) for refusal in flex.refusals(problem()))
    finally:
        requirements._refusals.cache_clear()


# --- caches -----------------------------------------------------------------------------------------------------------


class Compiler:
    """Replaces torch.compile: returns the function itself, and counts calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.functions: list[Any] = []
        monkeypatch.setattr(torch, "compile", self)
        monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", lambda q, *rest, **options: q)

    def __call__(self, function: Any, **options: Any) -> Any:
        assert options["fullgraph"]
        assert not options["dynamic"]
        self.functions.append(function)
        return function


def call(of: Problem) -> None:
    example = make(of)
    masks: dict[str, Any] = example.masks
    flex.run(example.q, example.k, example.v, of, **masks)


def test_each_problem_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    problems = [problem(length=n) for n in (8, 9)]
    assert [flex.first_call_ms(each) for each in problems] == [flex.CPU_COMPILE_MS] * 2
    for each in problems * 2:
        call(each)
    assert [flex.first_call_ms(each) for each in problems] == [0, 0]
    assert len(compiler.functions) == 2
    # The compiler limits kernels per code object.
    assert compiler.functions[0].__code__ is not compiler.functions[1].__code__


@pytest.mark.parametrize("flash_block", [0, 64, 256])
def test_block_tables_match_torch(flash_block: int) -> None:
    """For a pattern with exactly known blocks they equal torch's, computed from the whole mask."""
    library = pytest.importorskip("torch.nn.attention.flex_attention")
    tables = attention._tables(problem(Window(300, 0), 500), None, flash_block)
    ours, side = library.BlockMask(mask_mod=library.noop_mask, **tables), flash_block or attention.BLOCK

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j <= 300) & (j <= i)

    theirs = library.create_block_mask(mask, None, None, 500, 500, device="cpu", BLOCK_SIZE=side)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "q_num_blocks", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.shape == theirs.shape


# --- by flash-attn 4 --------------------------------------------------------------------------------------------------


@pytest.fixture
def flash4(unknown_packages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The packages of a machine with flash-attn 4, which may be changed, and an H100."""
    there = {"flash-attn-4": "4.0.0b36", "triton": "3.9.0"}
    libraries.flash_attn_4(monkeypatch, [])
    installed(monkeypatch, there)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    yield there
    flex_flash._compiled.cache_clear()


def on_cuda(pattern: Pattern = LONGNET, **changes: Any) -> Problem:
    return problem(pattern, dtype=torch.bfloat16, device=torch.device("cuda", 0), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"return_lse": True}, ""),
        ({"needs_grad": True}, ""),
        ({"has_key_mask": True, "has_seq_lens": True}, ""),
        ({"pattern": Window(9, 0, sinks=2)}, ""),
        ({"needs_grad": True, "return_lse": True}, "its backward pass takes no gradient of lse"),
        ({"needs_grad": True, "deterministic": True}, "has no deterministic backward pass"),
        ({"dtype": torch.float32}, "computes in bfloat16, float16, not float32"),
        ({"pattern": Dense(True)}, "computes Window, Dilated, Neighborhood, not Dense(causal)"),
        ({"head_dim": 136}, "takes a head_dim up to 128, not 136"),
        ({"head_dim": 20}, "takes multiples of 8, not 20"),
        ({"head_dim": 80}, ""),
        ({"head_dim": 80, "needs_grad": True}, "has a backward pass for multiples of 32, not a head_dim of 80"),
        ({"device": torch.device("cpu")}, "runs on cuda, not cpu"),
    ],
)
def test_what_flash_4_takes(changes: dict[str, Any], text: str, flash4: dict[str, str]) -> None:
    assert "; ".join(map(str, flex_flash.refusals(replace(on_cuda(head_dim=32), **changes)))) == text


def test_where_flash_4_is_not_offered(flash4: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        environment.installed.cache_clear()
        return "; ".join(map(str, flex_flash.refusals(on_cuda())))

    assert text() == ""
    assert flex_flash.version() == f"{torch.__version__} flash-attn-4 4.0.0b36"
    for has, needed in (((8, 9), "9.0 or higher"), ((12, 0), "11.0 or lower")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None, has=has: has)
        assert text().startswith(f"needs compute capability {needed}")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (10, 3))
    assert text() == ""
    monkeypatch.setattr(flex_flash, "VERSION", (2, 10))
    assert text().startswith("is in torch 2.11 and newer, this is ")
    monkeypatch.setattr(flex_flash, "VERSION", (2, 11))
    del flash4["flash-attn-4"]
    assert text().startswith("package flash-attn-4 is not installed (pip install 'attn-dispatch[flash4]'")
    assert registry.version_of(registry.load("flex_flash")) is None


@pytest.mark.parametrize(("capability", "side"), [((9, 0), 128), ((10, 0), 256)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_call_of_flash_4(
    masked: bool, capability: tuple[int, int], side: int, flash4: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel takes tables of partly and of wholly seen blocks, of its tiles; Triton's is compiled apart."""
    Compiler(monkeypatch)
    given: list[dict[str, Any]] = []

    def flex_attention(q: Any, *rest: Any, **options: Any) -> Any:
        given.append(options)
        return q

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flex_attention)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    of = problem(Window(300, 0, sinks=2), 600, dtype=torch.bfloat16, has_key_mask=masked)
    example = make(of)
    assert flex_flash.first_call_ms(of) > flex.first_call_ms(of)
    for run in (flex_flash.run, flex.run):
        masks: dict[str, Any] = example.masks
        run(example.q, example.k, example.v, of, **masks)
    (theirs, ours) = (options["block_mask"] for options in given)
    assert [options.get("kernel_options") for options in given] == [{"BACKEND": "FLASH"}, None]
    assert [each.BLOCK_SIZE for each in (theirs, ours)] == [(side, side), (128, 128)]
    assert theirs.full_kv_num_blocks.shape == theirs.kv_num_blocks.shape == (1, 1, -(-600 // side))
    assert theirs.full_q_num_blocks.shape == theirs.q_num_blocks.shape
    assert bool(theirs.full_kv_num_blocks.any()) == (not masked and side == 128)
    assert (ours.full_kv_num_blocks is None) == masked
    assert flex_flash.first_call_ms(of) == 0
    flex_flash.forget(of)
    assert (flex_flash.first_call_ms(of) > 0, flex.first_call_ms(of)) == (True, 0)


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(of: Problem) -> tuple[Example, Oracle]:
    """An example on which the compiled kernel is correct."""
    reasons = [str(refusal) for refusal in flex.refusals(of)]
    if reasons:
        pytest.skip("; ".join(reasons))
    example = make(of)
    gate = Oracle.of(example)
    with trial_limits.isolated(of.device):  # as a trial runs it
        assert gate.check(gate.run(FLEX)).failures == ()
    assert flex.first_call_ms(of) == 0
    return example, gate


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.full
def test_compiled_dilated() -> None:
    """Full, partial and empty blocks, keys seen more than once; compiled once whatever the torch state of a call."""
    before = graphs()
    of = problem(length=300)
    example, gate = compiled(of)
    assert graphs() == before + 1
    q, k, v = example.q, example.k, example.v
    outs = [attend(q, k, v, LONGNET, backend="flex")]
    with torch.inference_mode(), torch.device("meta"):
        outs.append(attend(q, k, v, LONGNET, backend="flex"))
    packed = torch.stack([q, k, v], dim=2).requires_grad_()
    with torch.no_grad():
        outs.append(flex.run(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], of))
    for out in outs:
        assert gate.check({"out": out}).failures == ()
    assert graphs() == before + 1
    flex._compiled.cache_clear()
    assert flex.first_call_ms(of) > 0


@pytest.mark.full
def test_compiled_with_masks() -> None:
    """Other masks use the same kernel. Grouped heads, and queries without a key."""
    before = graphs()
    grid = Neighborhood((5, 8, 8), (3, 5, 3), (1, 1, 2), (False, True, False), "shift")
    plain = Case("masks", grid, (2, 320, 4, 16), kv_heads=2, key_mask=True, seq_lens=True)
    of = replace(plain.problem(torch.float32, needs_grad=False), return_lse=False)
    compiled(of)
    other = make(of, seed=1)
    other.masks["key_mask"][:, :40] = False
    other.masks["seq_lens"][0] = 0
    gate = Oracle.of(other)
    found = gate.run(FLEX)
    assert gate.check(found).failures == ()
    assert not found["out"][0].any()
    assert graphs() == before + 1


def up_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with aot_eager."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_with(f, backend="aot_eager", **options))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *inputs: None)


# --- masks made of data -----------------------------------------------------------------------------------------------

OF_DATA: list[RangesForm | BlocksForm] = [
    RangesForm(1, by_row=False),
    RangesForm(3, by_row=True),
    BlocksForm((48, 100), "kv_heads", by_row=True, is_list=True, within=Window(90, 9, sinks=2)),
    BlocksForm((128, 64), "all", by_row=False, is_list=False, within=Dilated((64, 128), (1, 2))),
    BlocksForm((7, 5), "heads", by_row=False, is_list=True, within=Dense(True)),
]


def hard_example(of: Problem, seed: int = 0) -> Example:
    """Queries and keys that see nothing, entries that stand twice; NaN where no query looks."""
    example, generator = make(of, seed), torch.Generator().manual_seed(seed)
    example.masks.update(pattern_data(of, generator, hard=True))
    seen = of.pattern.bound(example.masks["pattern_data"]).multiplicity(of.q_len, of.k_len, of.heads) > 0
    by_head = torch.unflatten((seen if seen.ndim == 4 else seen[None]).any(2), 1, (of.kv_heads, -1))
    hidden = ~by_head.any(2).transpose(1, 2)
    with torch.no_grad():
        for x in (example.k, example.v):
            x.masked_fill_(hidden[..., None], math.nan)
    return example


class Unknown(Pattern):
    def _counts(self, *arguments: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


def of_data(form: Pattern, **changes: Any) -> Problem:
    return replace(problem(length=300), pattern=form, kv_heads=2, **changes)


@pytest.mark.parametrize("form", OF_DATA, ids=str)
def test_masks_made_of_data(form: Pattern, uncompiled_flex: None) -> None:
    assert failures(FLEX, hard_example(of_data(form, needs_grad=True, return_lse=True))) == ()


def test_what_blocks_are_cut_by() -> None:
    """By what it computes without tensors. The other kernel takes no tensors."""
    form = BlocksForm((8, 8), "all", by_row=False, is_list=False, within=Window(3, 0))
    assert not {"pattern", "lengths"} & codes(of_data(form, q_len=4))
    assert "lengths" in codes(of_data(replace(form, within=LONGNET), q_len=4))
    assert "pattern" in codes(of_data(replace(form, within=Unknown())))
    other = registry.load("flex_flash")
    assert other.run_documents is None
    assert str(refusals_of(other, of_data(form))[-1]).startswith("takes no tensors of a pattern: Blocks(8 x 8")


def test_kernels_are_of_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors of a form, of another density too, are no other problem to the compiler."""
    compiler = Compiler(monkeypatch)
    for density in (None, -4):
        example = make(of_data(replace(OF_DATA[0], density=density)))
        masks: dict[str, Any] = example.masks
        flex.run(example.q, example.k, example.v, example.problem, **masks)
        assert flex.first_call_ms(example.problem) == 0
    assert len(compiler.functions) == 1


@pytest.mark.full
@pytest.mark.parametrize("form", [None, *OF_DATA[1:4]], ids=str)
def test_compiled_up_to_the_cuda_kernel(form: Pattern | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """lse and gradients, which the CPU kernel lacks."""
    up_to_the_kernel(monkeypatch)
    plain = Case("traced", LONGNET, (2, 70, 4, 16), kv_heads=2, key_mask=True, seq_lens=True)
    example = make(plain.problem(torch.float32, needs_grad=True))
    gate = Oracle.of(example if form is None else hard_example(of_data(form, needs_grad=True, return_lse=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backward pass is compiled by the first one
        found = gate.run(FLEX)
    assert gate.check(found).failures == ()
    assert set(found) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.full
@pytest.mark.parametrize("form", OF_DATA[1:3], ids=str)
def test_compiled_with_data(form: Pattern) -> None:
    """Two compilations serve all tensors: those by which no key is seen twice have a kernel without logarithms."""
    before = graphs()
    compiled(of_data(form))
    for seed in (1, 2):
        assert failures(FLEX, hard_example(of_data(form), seed)) == ()
    assert graphs() <= before + 2


@pytest.mark.full
def test_compiled_with_documents() -> None:
    """Of all lengths, by one kernel."""
    before, (q, k, v) = graphs(), (torch.randn(2, 300, 4, 16).bfloat16() for _ in range(3))
    for lengths in ((300,), (1, 130, 100, 69), (60,) * 5):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
        for pattern in (Window(40, 0), Dense(True)):
            out = attend(q, k, v, pattern, documents=ids, backend="flex")
            right = attend(q.double(), k.double(), v.double(), pattern, documents=ids, backend="manual")
            assert (out - right).abs().max() < 0.02
    assert graphs() == before + 1


# --- token orders -----------------------------------------------------------------------------------------------------

IN_ORDER = [
    ("hilbert", Neighborhood((9, 15), (5, 3))),
    ("hilbert", Neighborhood((12, 13), (3, 5), (2, 1), (True, False), "shift")),
    ("hilbert", Neighborhood((5, 6, 7), (3, 3, 5))),
    ("residue", Dilated((64, 100), (2, 4), is_causal=True)),
]


STORED = [*IN_ORDER, ("hilbert", Window(20, 3)), ("hilbert", IN_ORDER[3][1])]


@thinned(
    ("order", "pattern", "stored", "masked"),
    [(*each, stored, masked) for stored in (False, True) for each in (IN_ORDER, STORED)[stored] for masked in (0, 1)],
    3,
)
def test_results_in_another_order(
    order: str, pattern: Pattern, stored: bool, masked: int, uncompiled_flex: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are stored in it are not permuted; masks go by place in the tensors."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    length = math.prod(pattern.grid) if isinstance(pattern, Neighborhood) else 130
    given = Reordered(pattern, order) if stored else pattern
    case = Case("", given, (2, length, 4, 16), kv_heads=2, seq_lens=bool(masked), key_mask=bool(masked))
    asked = case.problem(torch.float32, needs_grad=True)
    assert flex.orders(asked) == ("natural",) if stored else order in flex.orders(asked)
    assert failures(FLEX, asked, "natural" if stored else order) == ()
