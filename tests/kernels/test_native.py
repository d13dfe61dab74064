"""The native kernel: its tables against the definition, its compiler, and its threads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch import attend
from attn_dispatch.backends import native
from attn_dispatch.cli import machine
from attn_dispatch.errors import BackendFailed, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library, run
from attn_dispatch.kernels.native.tables import PERIOD_LIMIT, TILE, _made_once, native_table_bytes, native_tables
from attn_dispatch.kernels.native.variants import AMX, VARIANTS
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.tuning.example import make
from tests.support import processes
from tests.support.calls import forget_native_library, setting
from tests.support.cases import failures, gate
from tests.support.pairwise import crossed

NATIVE = registry.load("native")

PRIVATE: Any = torch  #: for names that type checkers do not know


def problem_of(pattern: Pattern, q_len: int, k_len: int | None = None, heads: int = 3) -> Problem:
    return Case("", pattern, (1, q_len, heads, 4), k_len=k_len).problem(torch.float32, needs_grad=False)


def table_multiplicity(problem: Problem) -> torch.Tensor:
    """How many times each query of each head sees each key by the tables."""
    found = torch.zeros(problem.heads, problem.q_len, problem.k_len, dtype=torch.int64)
    tables = native_tables(problem)
    first_tile = tables.first_tile.tolist()
    for head, kind in enumerate(tables.head_class.tolist()):
        for query, step, count, first_run, runs in tables.tiles[first_tile[kind] : first_tile[kind + 1]].tolist():
            assert 1 <= count <= TILE
            q = query + step * torch.arange(count)
            for key, k_step, keys, lo, hi in tables.runs[first_run : first_run + runs].tolist():
                k = key + k_step * torch.arange(keys)
                seen = (k - q[:, None] >= lo) & (k - q[:, None] <= hi)
                found[head, q[:, None], k] += seen
    return found


def is_exact(problem: Problem) -> bool:
    expected = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads)
    return torch.equal(table_multiplicity(problem), expected.expand(problem.heads, -1, -1).long())


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.pattern, Dense | Window | Dilated)])
def test_tables_match_the_multiplicity_and_fit_their_declared_bytes(case: Case) -> None:
    problem = case.problem(torch.float32, needs_grad=False)
    assert is_exact(problem)
    tables = native_tables(problem)
    assert tables.tiles.nbytes + tables.runs.nbytes <= native_table_bytes(problem) / 3


@given(st.data())
def test_tables_of_any_dilation(data: st.DataObject) -> None:
    rates = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
    branches = data.draw(st.lists(st.tuples(st.integers(1, 60), rates), min_size=1, max_size=4))
    pattern = Dilated(
        tuple(w for w, _ in branches),
        tuple(r for _, r in branches),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(["mod", "block"])),
        data.draw(st.sampled_from(["all", "split"])),
    )
    assert is_exact(problem_of(pattern, data.draw(st.integers(1, 150))))


LONG = [
    Case("dense", Dense(), (1, 500, 4, 1), k_len=300, kv_heads=2),
    Case("causal-few-queries", Dense(is_causal=True), (1, 300, 4, 1), k_len=500, kv_heads=2),
    Case("causal-few-keys", Dense(is_causal=True), (1, 500, 4, 1), k_len=300, kv_heads=2),
    Case("window-wide", Window(100, 0), (1, 700, 4, 1), kv_heads=2),
    Case("window-ahead", Window(10, 200), (1, 300, 4, 1), k_len=700, kv_heads=2),
    Case("dilated", Dilated((128, 256, 512), (1, 2, 4)), (1, 1500, 4, 1), kv_heads=2),
    Case("dilated-causal", Dilated((128, 256, 512), (1, 2, 4), is_causal=True), (1, 1500, 4, 1), kv_heads=2),
]


@crossed(
    lambda case, dtype, head_dim: {"dtype": dtype, "head_dim": head_dim},
    case=LONG,
    dtype=run.DTYPES,
    head_dim=(20, 64, 72),
)
def test_more_than_one_block_of_keys(case: Case, dtype: torch.dtype, head_dim: int) -> None:
    """Lengths above a tile and above a block of keys, which the small cases do not reach."""
    case = replace(case, shape=(*case.shape[:3], head_dim))
    assert failures(NATIVE, case.problem(dtype, needs_grad=True)) == ()


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [*zip((Dense(is_causal=True), Dilated((256, 512), (2, 4)), Window(200, 0)), run.DTYPES, strict=True)],
    ids=str,
)
def test_keys_that_are_fetched_a_block_ahead(pattern: Pattern, dtype: torch.dtype) -> None:
    """Where a head's keys and values are more than NEAR_BYTES of attention/vectors.h."""
    problem = Case("", pattern, (1, 70, 2, 2056), k_len=280, kv_heads=1).problem(dtype, needs_grad=True)
    assert 2 * problem.k_len * problem.head_dim * dtype.itemsize > 2 << 20
    assert failures(NATIVE, problem) == ()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_threads_that_share_a_key_head(kv_heads: int) -> None:
    """Each has its own sums; results are the same in every run."""
    case = Case("", Dense(is_causal=True), (1, 400, 4, 24), kv_heads=kv_heads)
    expected = gate(case.problem(torch.float32, needs_grad=True))
    first = expected.run(NATIVE)
    assert expected.check(first).failures == ()
    again = expected.run(NATIVE)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_growing_scores() -> None:
    """Every block of keys raises the maximum, so that every block rescales the earlier sums."""
    problem = Case("", Dense(), (1, 70, 1, 16)).problem(torch.float32, needs_grad=False)
    problem = replace(problem, k_len=1000, scale=1.0, return_lse=True)
    k = torch.arange(1000.0).view(1, 1000, 1, 1).expand(1, 1000, 1, 16) / 64
    assert failures(NATIVE, replace(make(problem), q=torch.ones(1, 70, 1, 16), k=k)) == ()


def test_refusals() -> None:
    plain = problem_of(Dense(), 8)
    assert native.refusals(plain) == []
    assert [str(r) for r in native.refusals(replace(plain, dtype=torch.float64))] == [
        "computes in bfloat16, float16, float32, not float64"
    ]
    rates = problem_of(Dilated((64, 64), (9, 8)), 128)
    reasons = [str(refusal) for refusal in native.refusals(rates)]
    assert reasons == [f"its dilation rates repeat every 72 tokens, over {PERIOD_LIMIT}"]


def found_before_and_after_a_call() -> list[Path | None]:
    forget_native_library()
    before = library._found()
    x = torch.ones(1, 2, 1, 4)
    assert attend(x, x, x, backend="native").sum() == 8
    return [before, library._found()]


def test_the_library_is_compiled_once(copying_compiler: Path) -> None:
    library_file = copying_compiler / "native" / library._file()
    assert found_before_and_after_a_call() == [None, library_file]
    assert list(library_file.parent.iterdir()) == [library_file]
    assert found_before_and_after_a_call() == [library_file, library_file]
    # A library that other users can write is not loaded, but compiled again.
    library_file.chmod(0o777)
    assert found_before_and_after_a_call() == [None, library_file]


def test_a_library_of_another_system_is_compiled_again(copying_compiler: Path) -> None:
    library_file = copying_compiler / "native" / library._file()
    library_file.parent.mkdir(parents=True)
    library_file.write_text("with another libc")
    assert library.load()._name == str(library_file)
    assert library_file.stat().st_size > 1000


@pytest.mark.parametrize("unwritable", ["home", "both"])
def test_folders_that_cannot_be_written(unwritable: str, copying_compiler: Path) -> None:
    there = [copying_compiler, cache_folder()][: 1 + (unwritable == "both")]
    for folder in there:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("in the way")
    beside = None if unwritable == "both" else cache_folder() / "native" / library._file()
    assert found_before_and_after_a_call() == [None, beside]
    assert all(folder.is_file() for folder in there)


def test_the_library_goes_with_the_decisions(copying_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a machine without a compiler, and to a user who is not the one that made the image."""
    native.prepare()
    version, kept = native.version(), cache_folder() / "native" / library._file()
    assert [path.stat().st_mode & 0o777 for path in (kept, kept.parent)] == [0o755, 0o755]
    shutil.rmtree(copying_compiler)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found_before_and_after_a_call() == [kept, kept]
    assert library.load()._name == str(kept)
    assert native.version() == version
    owner = kept.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert library._found() == (kept if owner == 0 else None)


def called_without_it(why: str) -> None:
    """Calls by name are refused, others run."""
    x = torch.ones(1, 3, 1, 4)
    for length in (2, 2, 3):
        with pytest.raises((BackendFailed, NoBackend), match=why):
            attend(x[:, :length], x[:, :length], x[:, :length], backend="native")
    assert attend(x, x, x).sum() == 12


def examined_without_it(why: str) -> dict[str, Any]:
    """What doctor tells in a process that has run nothing."""
    forget_native_library()
    report = machine.examined()
    (row,) = (each for each in report["backends"] if each["name"] == "native")
    assert not row["usable"]
    assert all(re.search(why, text) for text in (row["reason"], report["native"]))
    return dict(row)


@pytest.mark.usefixtures("short_trials")
def test_a_compiler_that_fails(copying_compiler: Path) -> None:
    """It is asked once in a process: then the backend is refused, unless a library of the package can run."""
    folder = copying_compiler.parents[1]
    cxx, log, package = folder / "c++", folder / "c++.log", folder / VARIANTS[-1].file
    shutil.copy(library.load()._name, folder / "kept.so")
    shutil.rmtree(copying_compiler)
    log.unlink()
    cxx.write_text("#!/bin/sh\necho $* >> \"$0.log\"\necho 'attention.cpp:1: error: no such flag' >&2\nexit 1\n")
    forget_native_library()
    called_without_it(why := re.escape(f"{cxx} failed: attention.cpp:1: error: no such flag"))
    assert len(log.read_text().splitlines()) == 1
    assert examined_without_it(why)["version"] is None
    (folder / "kept.so").rename(package)
    forget_native_library()
    x = torch.ones(1, 2, 1, 4)
    assert attend(x, x, x, backend="native").sum() == 8
    assert library.load()._name == str(package)
    assert library.in_use().startswith(f"the package's library for {VARIANTS[-1].name}")


#: A compiler that makes libraries which cannot be loaded.
USELESS = """#!/bin/sh
echo "$*" >> "$0.log"
for last; do :; done
echo 'extern "C" void missing(); void calls() { missing(); }' | g++ -shared -fPIC -x c++ - -o "$last"
"""


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("made_by", ["compiler", "package"])
def test_a_library_that_cannot_be_loaded(
    made_by: str, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """Warnings say why, each once."""
    cxx, why = copying_compiler.parents[1] / "c++", "undefined symbol: missing"
    cxx.write_text(USELESS)
    if made_by == "package":
        for variant in VARIANTS:
            subprocess.run([str(cxx), str(cxx.parent / variant.file)], check=True)
        why = f"{cxx.parent}/attention-.*{why}"
        monkeypatch.setenv("CXX", "no-such-compiler")
    (log := Path(f"{cxx}.log")).unlink(missing_ok=True)
    forget_native_library()
    called_without_it(why)
    assert all(re.search(why, text) for text in warnings())
    assert len(warnings()) == len(set(warnings())) > 0
    assert log.exists() == (made_by == "compiler")
    assert made_by == "package" or log.read_text().count("attention.cpp") == 1
    examined_without_it(why)


# --- torch state around a call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, torch.device("meta")], ids=str)
def test_changed_defaults(default: Any) -> None:
    expected = gate(Case("", Dilated((16, 32), (1, 2)), (1, 50, 2, 8)).problem(torch.float32, needs_grad=True))
    _made_once.cache_clear()
    is_dtype = isinstance(default, torch.dtype)
    with setting(torch.get_default_dtype, torch.set_default_dtype, default) if is_dtype else default:
        found = expected.run(NATIVE)
    assert expected.check(found).failures == ()
    nowhere = torch.empty(1, 8, 3, 4, device="meta")
    with pytest.raises(TypeError, match="plain tensors"):
        native.run(nowhere, nowhere, nowhere, problem_of(Dense(), 8))


def test_tensors_without_memory() -> None:
    """Also in repeated calls: an address of 0 would end the process."""
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    attend(q, k, v, backend="native")
    with pytest.raises(BackendFailed, match="plain tensors"):
        attend(PRIVATE._efficientzerotensor((1, 8, 2, 4)), k, v, backend="native")
    k.untyped_storage().resize_(0)
    with pytest.raises(BackendFailed, match="plain tensors"):
        attend(q, k, v, backend="native")


class Tagged(torch.Tensor):
    """A subclass without a `__torch_dispatch__`."""


def test_what_has_no_specialized_function() -> None:
    """Results of subclasses are plain as those of `run` are; routes hold no large tables."""
    x = torch.randn(1, 8, 3, 4)
    problem = problem_of(Dense(), 8)
    assert run.specialized(problem, x, x, x) is not None
    assert run.specialized(problem, x.as_subclass(Tagged), x, x) is None
    assert type(attend(x.as_subclass(Tagged), x, x, backend="native")) is torch.Tensor
    grid = Neighborhood((24, 24), (9, 9))
    x = torch.randn(1, 576, 3, 4)
    assert native_tables(problem_of(grid, 576)).nbytes > run.TABLE_BYTES
    assert run.specialized(problem_of(grid, 576), x, x, x) is None


@pytest.mark.parametrize("dtype", run.DTYPES, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_visible_nan_reaches_the_result(dtype: torch.dtype, name: str) -> None:
    problem = Case("", Dense(), (1, 70, 1, 16)).problem(dtype, needs_grad=False)
    example = make(problem)
    tensor: torch.Tensor = getattr(example, name)
    tensor[0, 3, 0, 5] = torch.nan
    out, _ = native.run(example.q, example.k, example.v, problem)
    assert out[0, 3].isnan().any()
    assert out.isnan().any(-1).all() or name == "q"


def test_large_scores_over_many_keys_in_bfloat16() -> None:
    """The maximum is the same in all blocks, so that no block rescales earlier sums."""
    problem = Case("", Dense(), (1, 16, 1, 16)).problem(torch.bfloat16, needs_grad=False)
    problem = replace(problem, k_len=20_000, scale=1.0, return_lse=True)
    q = torch.full((1, 16, 1, 16), 7.875).bfloat16()
    v = torch.randn(1, 20_000, 1, 16).bfloat16()
    assert failures(NATIVE, replace(make(problem), q=q, k=q[:, :1].expand(1, 20_000, 1, 16), v=v)) == ()


def test_the_library_is_compiled_by_a_launcher(copying_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ccache, cxx = (copying_compiler.parents[1] / name for name in ("ccache", "c++"))
    ccache.write_text('#!/bin/sh\necho "$1" >> "$0.log"\nexec "$@"\n')
    ccache.chmod(0o755)
    monkeypatch.setenv("CXX", f"{ccache} {cxx}")
    assert found_before_and_after_a_call()[0] is None
    assert set(Path(f"{ccache}.log").read_text().split()) == {str(cxx)}


# --- tile registers ---------------------------------------------------------------------------------------------------


#: The system refuses them to a thread whose signal stack is too small for them; then vectors compute.
WITHOUT_TILE_REGISTERS = """
import ctypes, torch
libc = ctypes.CDLL(None)
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
from attn_dispatch import attend
q, k, v = torch.randn(3, 1, 70, 2, 64, generator=torch.manual_seed(0)).bfloat16()
found, expected = attend(q, k, v, backend="native"), attend(q.double(), k.double(), v.double(), backend="manual")
assert (found - expected).abs().max() < 0.01
allowed = ctypes.c_ulong()
libc.syscall(158, 0x1022, ctypes.byref(allowed))  # arch_prctl, ARCH_GET_XCOMP_PERM
assert not allowed.value & 1 << 18
"""


@pytest.mark.skipif(not library.cpu_flags() >= AMX, reason="a processor with AMX is needed")
def test_without_permission_for_tile_registers() -> None:
    done = processes.run(WITHOUT_TILE_REGISTERS)
    assert done.returncode == 0, done.stderr


# --- where no memory is left for its threads --------------------------------------------------------------------------


SHORT_OF_MEMORY = """
import ctypes, resource
import torch
from attn_dispatch.kernels.native import library, run
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
problem = Case("", Dense(), (1, 40, 2, 8)).problem(torch.float32, needs_grad=False)
made = library.Args.from_buffer_copy(run.forward_arguments(problem, 2).args)
made.head_dim, kernels = 2**30, library.load()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
print(kernels.attention_forward(ctypes.byref(made)), kernels.attention_backward(ctypes.byref(made)))
"""


def test_a_thread_without_memory_computes_nothing() -> None:
    assert processes.run(SHORT_OF_MEMORY).stdout.split() == ["1", "1"]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_memory_for_the_kernel_is_an_error(needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Case("", Dense(), (1, 40, 2, 8)).problem(torch.float32, needs_grad=needs_grad)
    example = make(problem)

    class Short:
        def attention_forward(self, given: Any) -> int:
            return 0 if needs_grad else 1

        def attention_backward(self, given: Any) -> int:
            return 1

        class attention_forward_on:  # noqa: N801 - as ctypes' functions, which have attributes
            def __new__(cls, *given: Any) -> Any:
                return 1

    monkeypatch.setattr(library, "load", Short)
    call = example.call(registry.load("native"))
    with pytest.raises(MemoryError, match="no memory is left"):
        call()
