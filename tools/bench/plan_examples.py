"""The output of `attn-dispatch plan` for the README's example. Counted, not measured.

python -m tools.bench.plan_examples
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from attn_dispatch.cli import main as attn_dispatch
from tools.lib.common import parser, write

TAKES = "5 s"
COMMAND = (
    "attn-dispatch plan --tokens 512M --ranks 16:64 --segments 2k,64k,32M --dilations 1,32,4k --dtype bf16 "
    "--device cpu --link 50 --rate 200"
)


def printed(command: str) -> list[str]:
    """The lines on standard output."""
    _, *words = command.split()
    with redirect_stdout(io.StringIO()) as out:
        code = attn_dispatch(words)
    if code:
        raise RuntimeError(f"{command} ended with {code}")
    return out.getvalue().splitlines()


def main() -> None:
    arguments = parser(__doc__, "plan.json").parse_args()
    lines = printed(COMMAND)
    print(*lines, sep="\n")
    write(arguments.output, {"command": COMMAND, "lines": lines})


if __name__ == "__main__":
    main()
