"""What `doctor` says of the compiled libraries holds in the measured figures."""

from __future__ import annotations

from attn_dispatch.kernels.native.variants import VARIANTS
from tools.docs.results import load


def test_what_a_compiler_gains() -> None:
    rows = [row["over_here"] for row in load("prebuilt")["rows"]]
    for variant in VARIANTS[:-1]:
        assert max(row[variant.name]["median"] for row in rows) <= 1.04
