"""Tables and JSON of the commands, and the table of an explanation."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cli.tables import print_json
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.store.decision import Row
from tests.support.commands import TWO, command

CUDA = "runs on cuda, not cpu"


def explained(*refusals: tuple[str, str, str]) -> Explanation:
    """A problem that sdpa runs, beside (backend, status, reason)."""
    chosen = Row(backend="sdpa", order="natural", status="chosen", median_ms=1.0, low_ms=0.9, high_ms=1.1)
    others = (
        Row(backend=backend, order="natural", status=status, reason=reason) for backend, status, reason in refusals
    )
    return Explanation("sdpa", "natural", "measured", "0123456789", (chosen, *others), "[1] float32", "cpu")


def test_a_notebook_shows_the_table_with_long_reasons_below_and_one_line_for_what_needs_cuda() -> None:
    long = f"package <flash> is missing; {'why ' * 30}end"
    found = explained(("flash", "not_installed", f"{long}; {CUDA}"), ("odd", "unsupported", long), ("x", "failed", ""))
    html = found._repr_html_()
    assert html == f"<pre>{escape(str(found))}</pre>"
    assert "<flash>" not in html
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "1 backend needs CUDA: flash"
    row = next(number for number, line in enumerate(lines) if line.startswith("odd"))
    assert lines[row].endswith("unsupported")
    assert " ".join("".join(lines[row + 1 : row + 3]).split()) == long
    forced = replace(found, choice=None)  # then nothing else is said
    assert "\nflash" in str(forced)


def test_profile_prints_a_line_per_problem_and_all_candidates_if_verbose(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = measured
    short, whole = (command(folder, "profile", *TWO, "--quick", *more).stdout for more in ((), ("--verbose",)))
    rows = [line.split() for line in short.splitlines() if line.startswith("[1, 64, 2, 16]")]
    assert len(rows) == 2
    for row, decision in zip(rows, printed["decisions"]):
        assert decision["choice"] in row
        assert "measured" in " ".join(row)
    assert max(map(len, short.splitlines()[:-1])) <= 120
    assert re.search(rf"\n2 problems: \d decided, \d provisional.*, 0 failed; stored in {folder}\n$", short)
    assert (whole.count(" need CUDA: "), whole.count("\ntriton "), whole.count("\nsdpa ")) == (2, 0, 2)


def test_json_is_ascii_without_infinity_and_nan(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"a\u202eb": "\u200b\x7f\udcff", "plain": ["Ω 日本 é", '\n\t"\\'], "odd": [math.inf, (math.nan, 1.5)]}
    print_json(given)
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert json.loads(shown) == {**given, "odd": [None, [None, 1.5]]}
