"""What `doctor` says of the compiled libraries holds in the measured figures."""

from __future__ import annotations

from attn_dispatch.kernels.native.variants import VARIANTS
from tools.docs.results import load


def test_what_a_compiler_gains() -> None:
    """Of a library that a processor takes. One without its instructions for bfloat16 is slower where it has them, and
    is not taken there: then the rows in float32 count.
    """
    found = load("prebuilt")
    bfloat16 = "avx512_bf16" in found["hardware"]["cpu"]["instruction_sets"]
    for variant in VARIANTS[:-1]:
        taken = ("avx512_bf16" in variant.needs) == bfloat16
        rows = [row for row in found["rows"] if taken or row["dtype"] == "float32"]
        assert len(rows) >= 6
        assert max(row["over_here"][variant.name]["median"] for row in rows) <= 1.04
