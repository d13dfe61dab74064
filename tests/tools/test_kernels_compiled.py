"""`tools.bench.kernels_compiled`: how machine code is read, on a few lines of it; the bars, on what Triton compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.kernels.triton.blocks import padded
from tests.support.compiling import compiled
from tools.docs import compiled_tables
from tools.docs.results import load
from tools.lib import makespan
from tools.lib.machine_code import Loop, cycles, innermost_loops, main_loop, parsed

ROOT = Path(__file__).parents[2]

#: A loop without a mask and one with it, in an outer loop; the first one waits, out of line, for a barrier.
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/              @!PT LDS RZ, [RZ] ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4 ;
        /*0040*/              @!P1 BRA `(.L_x_4) ;
.L_x_5:
        /*0050*/                   LDSM.16.M88.4 R8, [R3] ;
        /*0060*/                   LDS.128 R12, [R4] ;
        /*0070*/                   HMMA.16816.F32.BF16 R24, R8, R12, R24 ;
        /*0080*/                   MUFU.EX2 R5, R5 ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*00a0*/                   HMMA.16816.F32.BF16 R24, R8, R12, R24 ;
        /*00b0*/                   STL [R1], R5 ;
        /*00c0*/                   LDL R5, [R1] ;
        /*00d0*/                   FSEL R5, R5, -INF, P3 ;
        /*00e0*/                   FSEL R6, R6, -INF, P3 ;
        /*00f0*/                   FSEL R7, R7, -INF, P3 ;
        /*0100*/                   FSEL R7, R7, -INF, P3 ;
        /*0110*/               @P0 BRA `(.L_x_2) ;
        /*0120*/               @P2 BRA `(.L_x_0) ;
        /*0130*/                   EXIT ;
.L_x_4:
        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4 ;
        /*0150*/              @!P1 BRA `(.L_x_4) ;
        /*0160*/                   BRA `(.L_x_5) ;
"""


def names(body: tuple[Any, ...]) -> list[str]:
    return [each.name for each in body]


def test_what_never_runs_is_no_instruction() -> None:
    code, labels = parsed(CODE)
    assert "LDS.128" in [each.opcode for each in code]
    assert len([each for each in code if each.name == "LDS"]) == 1
    assert code[labels[".L_x_2"]].name == "HMMA"
    assert [each.predicate for each in code if each.name == "BRA"] == ["!P1", "!P0", "P0", "P2", "!P1", ""]


def test_innermost_loops_of_products() -> None:
    plain, masked = sorted(map(names, innermost_loops(CODE)), key=len)
    # The wait that is repeated is no part of a pass; the way back from it is.
    assert sorted(plain) == sorted(["SYNCS", "BRA", "LDSM", "LDS", "HMMA", "MUFU", "BRA", "BRA"])
    assert masked == ["HMMA", "STL", "LDL", "FSEL", "FSEL", "FSEL", "FSEL", "BRA"]


def test_a_way_back_into_a_loop_is_no_loop() -> None:
    """Code out of line, behind everything else, that jumps into the middle of a loop."""
    assert all("EXIT" not in names(body) for body in innermost_loops(CODE))


def test_the_main_loop_is_the_shortest() -> None:
    shorter = CODE.replace("        /*0080*/                   MUFU.EX2 R5, R5 ;\n", "")
    assert "LDSM" in names(main_loop(shorter).body)
    with pytest.raises(LookupError, match="no loop"):
        main_loop(CODE.replace("HMMA", "HADD2"))


def test_cycles_of_units() -> None:
    (plain,) = [Loop(body) for body in innermost_loops(CODE) if "LDSM" in names(body)]
    assert plain.products(warps=4) == 4 * 16 * 8 * 16
    # 8 instructions of 4 warps, 4 a cycle; 32 exponentials each, 16 a cycle; 512 + 512 bytes each, 128 a cycle.
    assert cycles(plain, warps=4) == {"issue": 8.0, "special": 8.0, "shared": 32.0}


@pytest.mark.parametrize(
    ("line", "products", "shared"),
    [
        ("HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR12], R24", 64 * 128 * 16, 128 * 16 * 2 / 128),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24", 64 * 128 * 16, (128 + 64) * 16 * 2 / 128),
        ("HGMMA.64x64x8.F32.TF32 R24, R152, gdesc[UR12], R24", 64 * 64 * 8, 64 * 8 * 4 / 128),
        ("HMMA.1688.F32.TF32 R24, R8, R12, R24", 4 * 16 * 8 * 8, 0.0),
    ],
)
def test_products_of_a_program(line: str, products: int, shared: float) -> None:
    """Of four warps; a warp group's products read at least one operand from shared memory."""
    code, _ = parsed(f"        /*0010*/   {line} ;")
    loop = Loop(tuple(code))
    assert loop.products(4) == products
    assert cycles(loop, 4)["shared"] == shared


def test_tensor_memory_is_not_counted() -> None:
    code, _ = parsed("        /*0010*/   UTCHMMA gdesc[UR22], gdesc[UR20], tmem[UR10], tmem[UR4], idesc[UR5], UPT ;")
    assert "shared" not in cycles(Loop(tuple(code)), 4)


# --- the bars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", makespan.MULTIPROCESSORS)
@pytest.mark.parametrize(("heads", "tokens"), makespan.HEADS_AND_TOKENS)
def test_causal_tiles_keep_all_multiprocessors_busy_to_the_end(heads: int, tokens: int, multiprocessors: int) -> None:
    assert makespan.of_least(heads, tokens, multiprocessors) <= 1.05
    assert makespan.of_least(heads, tokens, multiprocessors, longest_first=False) > 1.05


COMPILE = """
import json, sys
from tools.bench.kernels_compiled import items, row_of

names = ("capability", "kernel", "head_dim", "dtype", "precision")
wanted = list(map(tuple, json.load(sys.stdin)))
found = [each for each in items([80, 86, 90]) if "share" not in each and tuple(each[name] for name in names) in wanted]
print(json.dumps([row_of(each) for each in found]))
"""
KERNELS = ("forward", "backward_q", "backward_kv")
HALF = [(kernel, head_dim, "bfloat16", "highest") for kernel in KERNELS for head_dim in (64, 96, 128)]
#: With other blocks these spill most of what they hold.
CLIFFS = {80: (80, "backward_kv", 64, "float32", "highest"), 90: (86, "backward_q", 256, "float32", "highest")}


@compiled
@pytest.mark.full
@pytest.mark.parametrize("capability", [90])
def test_preferred_blocks_as_they_are_compiled(capability: int, tmp_path: Path) -> None:
    """Nothing is spilled in a main loop, but where a GPU was faster so; 16-bit blocks fit as estimated."""
    wanted = [(capability, *each) for each in HALF] + [CLIFFS[capability]]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, env=env, input=json.dumps(wanted), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == len(wanted)
    for row in rows:
        assert not row["too_large"], row
        if row["dtype"] == "bfloat16":
            assert row["tensor_instructions"] > 0, row
            assert row["shared_bytes"] <= row["estimated_bytes"], row
            assert row["bounds"]["tensor"] == 1.0, row  # no product is made twice, nor of more than head_dim's parts
        if row["local_instructions"]:
            assert row["capability"] == 90, row
            assert is_timed_fastest(row), row


def is_timed_fastest(row: dict[str, Any]) -> bool:
    """Whether no block of a kernel was faster on an H100, by the mean over patterns in bfloat16, than that of `row`.

    Timed with head_dim rounded up to a power of two.
    """
    found = json.loads((ROOT / "tools" / "results" / "gpu" / "blocks.json").read_text())["summary"]
    ranked = found[f"triton {row['kernel']} bfloat16 hd{padded(row['head_dim'])}"]
    return bool(ranked[0]["block"] == row["block"])


def test_sums_of_two_powers_are_shown_beside_the_next_power() -> None:
    """Of a bound of 0.8 at head_dim 128, head_dim 96 would have 0.6, were it padded."""
    row = {"capability": 80, "kernel": "forward", "dtype": "bfloat16", "precision": None, "stack_bytes": 0}
    row |= {"block": [128, 32, 4, 3], "registers": 255, "local_instructions": 0}
    rows = [row | {"head_dim": 128, "bounds": {"shared": 0.8}}, row | {"head_dim": 96, "bounds": {"tensor": 1.0}}]
    assert compiled_tables.sums(rows[:1]) == []
    *_, line = compiled_tables.sums(rows)[-1].splitlines()
    assert line == "| `forward` | bfloat16 | 96 | 60% -> 128 x 32, 4, 3: 100%; 255 |"


def test_results_say_where_a_bar_is_missed() -> None:
    found, text = load("kernels_compiled"), compiled_tables.compiled()
    assert "Bounds are not times" in text
    for version in found["versions"]:
        for row in compiled_tables.spilling(compiled_tables.chosen(found, version)):
            assert f"{compiled_tables._title(row)} ({row['local_instructions']})" in text
            if row["capability"] == 90:
                assert is_timed_fastest(row)
