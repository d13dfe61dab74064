"""`inspect --thresholds` and `profile --thresholds`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch import profiling
from attn_dispatch.cli import main
from attn_dispatch.cli.commands.profile import DENSITIES
from attn_dispatch.cli.plots import curve
from attn_dispatch.cli.thresholds import threshold_text
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.learning.thresholds import Threshold
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.spec.data import BlocksForm
from attn_dispatch.spec.pattern import Neighborhood
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from tests.support import made_up
from tests.support.commands import problems
from tests.support.crossovers import HILBERT, LENGTHS, NATURAL, crossing, measured, planted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTN_DISPATCH_MODE", raising=False)
    return tmp_path


def store_all(folder: Path, *decisions: Decision) -> None:
    for decision in decisions:
        Store(folder).put(decision)


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def store_three_series(folder: Path) -> None:
    """A crossover at 3,000 tokens, one length alone, one that never wins."""
    store_all(folder, *planted(crossing(3000, 0.3), 1))
    store_all(folder, measured(1024, {NATURAL: 2.0, HILBERT: 1.0}, window=31))
    store_all(folder, *(measured(n, {NATURAL: 0.5, HILBERT: 1.0}, window=7) for n in LENGTHS[:3]))


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_three_series(folder)
    lines = output(capsys, "inspect", "--thresholds").splitlines()
    rows = [re.split(r"\s{3,}", line) for line in lines if line.startswith("Neighborhood") and "   " in line]
    assert [row[:6] for row in rows] == [
        [f"Neighborhood(window={w},{w})", "float32", "64", "forward", "hilbert", n]
        for w, n in ((13, "10"), (31, "1"), (7, "3"))
    ]
    above, unknown, never = (row[-1] for row in rows)
    assert re.fullmatch(r"above (2,\d00|3,\d00) tokens \(2,048 - 4,096\)", above)
    assert unknown == "needs more lengths: 2 at least"
    assert never == "never (up to 1,024 measured)"
    assert lines[0] == f"silicon   {made_up.SILICON}"
    assert max(map(len, lines)) <= 150


def test_a_picture() -> None:
    lines = curve([(1000, 0.4, 0.5, 0.8), (2000, 0.8, 1.0, 1.5), (4000, 1.5, 2.0, 2.5)], 2000)
    places = [line.index("o") for line in lines if "o" in line.partition("|")[2]]
    assert places == sorted(places, reverse=True)  # the ratio rises to the right
    assert lines[0].startswith("  2.50x |")
    assert lines[-3].startswith("  0.40x |")
    assert [line.index("o") for line in lines if line.startswith("  1.00x |")] == [lines[-2].index("^")]
    assert lines[-1].split() == ["1,000", "2,000", "4,000", "tokens"]


def test_inspect_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_three_series(folder)
    printed = json.loads(output(capsys, "inspect", "--thresholds", "--json"))
    assert printed["folder"] == str(folder)
    above, unknown, never = printed["thresholds"]
    assert [each["verdict"] for each in (above, unknown, never)] == ["above", "unknown", "never"]
    assert (above["low"], above["high"], above["measured_to"]) == (2048, 4096, LENGTHS[-1])
    assert 2048 < above["tokens"] <= 4096
    assert (never["tokens"], never["low"], never["high"]) == (None, 1024, None)
    assert (unknown["tokens"], unknown["low"], unknown["high"]) == (None, None, None)
    both = {"window": [13, 13], "dilation": [1, 1], "is_causal": [False, False]}
    assert above["pattern"] == {"kind": "Neighborhood", "edges": "clip", **both}
    assert (above["dtype"], above["head_dim"], above["direction"]) == ("float32", 64, "forward")
    assert (above["order"], above["silicon"]) == ("hilbert", made_up.SILICON)
    stored = {path.stem for path in folder.glob("v2/*/*/*.json")}
    assert {each["key"] for series in printed["thresholds"] for each in series["points"]} == stored
    assert [each["tokens"] for each in above["points"]] == list(LENGTHS)
    assert all(each["low"] <= each["gain"] <= each["high"] for each in above["points"])


def test_inspect_without_thresholds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_all(folder, made_up.decision(made_up.problem_at(1024), {NATURAL: 1.0}))
    assert "attn-dispatch profile --thresholds" in output(capsys, "inspect", "--thresholds")
    assert json.loads(output(capsys, "inspect", "--thresholds", "--json"))["thresholds"] == []


def test_the_direction_includes_other_properties_of_a_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more: dict[str, Any] = {"needs_grad": True, "has_key_mask": True, "dropout_p": 0.5, "ranks": 2}
    store_all(folder, *(measured(n, {NATURAL: 2.0, HILBERT: 1.0}, **more) for n in LENGTHS[:2]))
    (series,) = json.loads(output(capsys, "inspect", "--thresholds", "--json"))["thresholds"]
    assert series["direction"] == "forward + backward key_mask dropout ranks 2"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((3147, 2048, 4096), "above 3,100 tokens (2,048 - 4,096)"),
        ((2049, 2048, 4096), "above 2,049 tokens (2,048 - 4,096)"),
        ((4096, 4095, 4096), "above 4,096 tokens (4,095 - 4,096)"),
        ((7, 4, 9), "above 7 tokens (4 - 9)"),
        ((1024, None, 1024), "from 1,024 tokens on, the shortest measured"),
        ((None, 65_536, None), "never (up to 65,536 measured)"),
    ],
)
def test_the_text_of_a_threshold(values: Any, expected: str) -> None:
    tokens, low, high = values
    assert threshold_text(Threshold("hilbert", {}, tokens, low, high, ())) == expected


def alike(head_dim: int, *windows: int) -> list[Decision]:
    return [measured(512, {NATURAL: 2.0, HILBERT: 1.0}, window=window, head_dim=head_dim) for window in windows]


def test_thresholds_are_sorted_by_pattern_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_all(folder, *alike(64, 7, 13), *alike(32, 7, 13), *alike(128, 7, 13))
    found = json.loads(output(capsys, "inspect", "--thresholds", "--json"))["thresholds"]
    assert [each["pattern"]["window"] for each in found] == [[13, 13]] * 3 + [[7, 7]] * 3
    rows = [line.split() for line in output(capsys, "inspect", "--thresholds").splitlines() if "hilbert" in line]
    assert [int(row[2]) for row in rows] == [each["head_dim"] for each in found] == [32, 64, 128] * 2


# --- profile ----------------------------------------------------------------------------------------------------------


def test_a_grid_is_scaled_to_lengths() -> None:
    found = problems("--grid", "64,64", "--window", "13,7", "--lengths", "1k:64k", "--causal")
    grids = [each.pattern.grid for each in found if isinstance(each.pattern, Neighborhood)]
    assert grids == [(n, n) for n in (32, 45, 64, 91, 128, 181, 256)]
    assert {each.pattern for each in found} == {Neighborhood(g, (13, 7), is_causal=(True,)) for g in grids}
    assert all(abs(math.log2(each.q_len / n)) < 0.1 for each, n in zip(found, (1024 << i for i in range(7))))


def test_a_window_that_a_small_grid_clips_is_whole_in_a_large_one() -> None:
    found = problems("--grid", "4,4", "--window", "13", "--lengths", "16,1024")
    assert [each.pattern for each in found] == [Neighborhood((4, 4), (7, 7)), Neighborhood((32, 32), (13, 13))]


@pytest.fixture
def profiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that would be measured; hilbert gains from 2,000 tokens on."""
    found: list[Problem] = []

    def profile(problems: list[Problem], *, report: Any, **options: Any) -> None:
        for index, problem in enumerate(problems):
            found.append(problem)
            times = {NATURAL: math.sqrt(problem.q_len / 2000), HILBERT: 1.0}
            where = silicon(problem.device)
            decision = made_up.decision(problem.to_dict(), times, silicon=where, key=problem.key(where))
            store_all(folder, decision)
            report(index, Explanation.of(decision))

    monkeypatch.setattr(profiling, "profile", profile)
    return found


ARGUMENTS = ("profile", "--thresholds", "--grid", "64,64", "--window", "13", "--shape", "1,1,2,16", "--device", "cpu")


def test_profile_measures_lengths_and_prints_thresholds(
    profiled: list[Problem], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_all(folder, *planted(crossing(3000)))  # on another machine
    printed = output(capsys, *ARGUMENTS, "--lengths", "8k,1k,2k", "--causal", "both")
    assert [each.q_len for each in profiled] == [n * n for n in (32, 32, 45, 45, 91, 91)]
    assert "stored in " in printed
    rows = [line for line in printed.splitlines() if line.startswith("Neighborhood") and "   " in line]
    assert len(rows) == 2
    assert all(re.search(r"above \d,\d00 tokens \(2,025 - 8,281\)$", row) for row in rows)
    assert all(row.split("(")[1].startswith("window=13,13") for row in rows)
    assert made_up.SILICON not in printed


def test_profile_prints_json_for_default_lengths(profiled: list[Problem], capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(output(capsys, *ARGUMENTS, "--json"))
    assert [each.q_len for each in profiled] == [n * n for n in (32, 45, 64, 91, 128, 181, 256)]
    (series,) = printed["thresholds"]
    assert series["verdict"] == "above"
    assert abs(math.log2(series["tokens"] / 2000)) < 1
    assert len(printed["decisions"]) == 7


def test_profile_measures_densities(profiled: list[Problem], capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--shape", "1,64,2,16", "--causal", "both", "--device", "cpu")
    output(capsys, "profile", "--thresholds", "--blocks", "16,8", *more)
    forms = [each.pattern for each in profiled]
    assert len(set(forms)) == len(forms) == 2 * len(DENSITIES)
    assert all(isinstance(form, BlocksForm) and form.size == (16, 8) and form.density in DENSITIES for form in forms)


def at_density(density: int, times: dict[tuple[str, str], float], **more: Any) -> Decision:
    within = {"kind": "Dense", "is_causal": True}
    pattern = {"kind": "BlocksForm", "size": [64, 64], "heads": "all", "by_row": False, "is_list": False}
    return measured(1024, times, pattern={**pattern, "within": within, "density": density}, **more)


MASKED = ("sdpa_mask", "natural")


def test_densities_below_which_skipping_pays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one dtype below 20 %; of another one never; of a third there is one density."""
    halves = (0, -2, -4, -6, -10)
    store_all(folder, *(at_density(n, {NATURAL: 5 * 2 ** (n / 2), MASKED: 1.0}) for n in halves))
    store_all(folder, *(at_density(n, {NATURAL: 2.0, MASKED: 1.0}, dtype="bfloat16") for n in halves))
    store_all(folder, at_density(0, {NATURAL: 2.0, MASKED: 1.0}, dtype="float16"))
    store_all(folder, at_density(-3, {NATURAL: 2.0}, dtype="float64"))  # nothing to compare with
    found = json.loads(output(capsys, "inspect", "--thresholds", "--json"))["densities"]
    assert [(each["dtype"], each["verdict"]) for each in found] == [
        ("bfloat16", "never"),
        ("float16", "unknown"),
        ("float32", "below"),
    ]
    below = found[-1]
    assert below["low"] == 0.125
    assert below["density"] == pytest.approx(0.2, rel=0.1)
    assert below["high"] == 0.25
    assert [each["density"] for each in below["points"]] == [1.0, 0.5, 0.25, 0.125, 0.03125]
    rows = [line for line in output(capsys, "inspect", "--thresholds").splitlines() if line.startswith("Blocks(")]
    assert [re.split(r"\s{3,}", row)[-1] for row in rows] == [
        "never (down to 3.1 % measured)",
        "needs more densities: 2 at least",
        density_text_of(below["density"]),
    ]


def density_text_of(density: float) -> str:
    return f"below {100 * density:.2g} % (12 % - 25 %)"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--blocks", "8,8,8", "--shape", "1,64,2,16"), "one or two numbers"),
        (("--blocks", "8", "--grid", "8,8", "--window", "3"), "no --from, --segments or --grid"),
        ((), "--grid H,W with --window, or --segments"),
        (("--lengths", "1k:4k", "--window", "9"), "--grid H,W with --window, or --segments"),
        (("--grid", "8,8", "--window", "3", "--lengths", "1k"), "at least 2 lengths"),
        (("--grid", "8,8", "--window", "3", "--lengths", "1024,1025"), "at least 2 lengths"),
        (("--from", "x"), "remove --from"),
    ],
)
def test_arguments_that_give_no_threshold_are_refused(
    arguments: tuple[str, ...], why: str, profiled: list[Problem], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("profile", "--thresholds", "--device", "cpu", *arguments)) == 2
    assert why in capsys.readouterr().err
    assert profiled == []
