"""One problem measured without a time limit, and its explanation.

python -m tools.bench.explain
"""

from __future__ import annotations

import os
import tempfile

import torch

from attn_dispatch import Dilated, profile
from attn_dispatch.spec.shapes import problem_of
from tools.lib.common import parser, write

PATTERN = Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True)


def main() -> None:
    given = parser(__doc__, "explain.json").parse_args()
    problem = problem_of((1, 8192, 8, 64), PATTERN, torch.float32, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTN_DISPATCH_CACHE_DIR"] = folder
        (explanation,) = profile([problem], progress=False)
    lines = str(explanation).splitlines()
    print(*lines, sep="\n")
    write(given, {"lines": lines})


if __name__ == "__main__":
    main()
