"""A Problem to plain data and back; invalid data is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import zeros

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import DTYPES
from tests.support import processes
from tests.support.definition import texts
from tests.support.fakes import SILICON

SHAPE = (2, 12, 4, 8)
PROBLEM = Problem.of(zeros(SHAPE), zeros(SHAPE), zeros(SHAPE))
PATTERNS: list[Pattern] = [
    *(Dense(), Dense(is_causal=True), Window(3, None), Window(None, 2), Window(0, 0), Window(3, 0, 2)),
    *(Dilated((4, 8), (1, 2), is_causal=True), Dilated((8, 4), (3, 2), heads="split")),
    Dilated((5,), (2,), offsets="block"),
    Neighborhood((3, 4), (3, 1), (1, 2), (True, False)),
    Neighborhood((12,), (3,), (2,), edges="shift"),
    Neighborhood((3, 4), (2, 3), edges="shift", stride=(1, 3)),
    Reordered(Neighborhood((3, 4), (3, 1), (1, 2), (True, False)), "hilbert"),
    Reordered(Dilated((8, 4), (3, 2), heads="split"), "residue"),
]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    swapped = st.booleans()
    q, k, v = (
        zeros(1, n, 12, 3, dtype=dtype).transpose(1, 2) if draw(swapped) else zeros(1, 12, n, 3, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    found = Problem.of(
        q.requires_grad_() if draw(st.booleans()) else q,
        k,
        v,
        draw(st.sampled_from(PATTERNS)),
        seq_lens=torch.tensor([5]) if draw(st.booleans()) else None,
        key_mask=torch.ones(1, 12, dtype=torch.bool) if draw(st.booleans()) else None,
        dropout_p=draw(st.floats(0, 1, exclude_max=True)),
        scale=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        return_lse=draw(st.booleans()),
    )
    return replace(found, ranks=draw(st.integers(1, 9)))


@given(problems())
def test_json_and_back(given_problem: Problem) -> None:
    found = Problem.from_dict(json.loads(json.dumps(given_problem.to_dict(), allow_nan=False)))
    assert found == given_problem
    assert hash(found) == hash(given_problem)
    assert found.key(SILICON) == given_problem.key(SILICON)
    assert str(found) == str(given_problem)


def test_to_dict_covers_every_field() -> None:
    changed = replace(PROBLEM, softcap=2.0, bias=(1, 1), bias_needs_grad=True, alibi_axes=1, flash_kernel="FA3")
    changed = replace(changed, batch_invariant=True)
    written = {field.name for field in fields(Problem) if field.init}
    assert set(changed.to_dict()) == written - {"is_document", "given"}  # decided as others are
    for axes in (1, 2):
        same = replace(changed, alibi_axes=axes, needs_grad=True)
        assert Problem.from_dict(json.loads(json.dumps(same.to_dict()))) == same


def test_windows_without_sinks_have_no_sinks_field() -> None:
    assert Window(3, 0).to_dict() == {"kind": "Window", "left": 3, "right": 0}
    assert Window(3, 0, 2).to_dict() == {"kind": "Window", "left": 3, "right": 0, "sinks": 2}
    assert str(Window(3, 0)) == repr(Window(3, 0)) == "Window(left=3, right=0)"
    assert str(Window(3, 0, 2)) == "Window(left=3, right=0, sinks=2)"
    assert replace(PROBLEM, pattern=Window(3, 0)).key(SILICON) == "ea4b7ca0475404773c43"


def test_branches_of_all_heads_have_no_share_of_heads() -> None:
    plain = Dilated((4, 8), (1, 2))
    assert set(plain.to_dict()) == {"kind", "segment_lengths", "dilation_rates", "is_causal", "offsets", "heads"}
    for first_head in (0, 2):
        shared = {**plain.to_dict(), "first_head": first_head, "all_heads": 6}
        assert plain.of_heads(first_head, 6).to_dict() == shared


def test_neighborhoods_without_strides_have_no_stride_field() -> None:
    plain = Neighborhood((3, 4), (3, 1), (1, 2), (True, False), "shift")
    assert set(plain.to_dict()) == {"kind", "grid", "window", "dilation", "is_causal", "edges"}
    assert replace(plain, stride=(2, 1)).to_dict() == {**plain.to_dict(), "stride": (2, 1)}
    assert replace(PROBLEM, pattern=plain).key(SILICON) == "78f8f0bd20d543cc8894"
    assert replace(PROBLEM, pattern=Neighborhood((12,), (3,), (2,))).key(SILICON) == "fc297552083f34423488"
    assert str(plain) == "Neighborhood(grid=(3, 4), window=(3, 1), dilation=(1, 2), causal=(True, False), edges=shift)"
    assert str(replace(plain, stride=(2, 1))) == f"{str(plain)[:-1]}, stride=(2, 1))"


def test_pickled_for_another_process(tmp_path: Path) -> None:
    """Hashes of strings differ from process to process."""
    (tmp_path / "pickled").write_bytes(pickle.dumps(PROBLEM))
    code = (
        "import pathlib, pickle, sys, torch\n"
        "from attn_dispatch import Problem\n"
        "found = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        f"x = torch.zeros({SHAPE})\n"
        "assert {Problem.of(x, x, x): 1}[found] == 1\n"
    )
    processes.run(code, str(tmp_path / "pickled")).check_returncode()


DEEP: dict[str, Any] = {}
for _ in range(100_000):
    DEEP = {"kind": DEEP}
HOSTILE: dict[str, dict[str, Any]] = {
    "batch-zero": {"batch": 0},
    "kv_heads": {"kv_heads": 3},
    "device-unknown": {"device": "abacus"},
    "pattern-kind": {"pattern": {"kind": "Spiral"}},
    "pattern-field": {"pattern": {"kind": "Window", "left": 3, "middle": 4}},
    "pattern-lengths": {"pattern": {"kind": "Neighborhood", "grid": [5, 5], "window": [3]}},
    "pattern-deep": {"pattern": DEEP},
    "scale-huge": {"scale": 10**400},
    "strides-str": {"strides": "bnhd"},
    "strides-flag": {"strides": ["bnhd", "bnhd", "bnhd+holes"]},
    "seq_lens-cross": {"has_seq_lens": True, "k_len": 13},
    "precision": {"matmul_precision": "lowest"},
    "softcap": {"softcap": -1.0},
    "bias_needs_grad-forward": {"bias_needs_grad": True, "bias": [1, 1]},
    "alibi_axes": {"alibi_axes": 3},
    "flash_kernel": {"flash_kernel": 3},
    "score-ranks": {"ranks": 2, "softcap": 2.0},
    "unknown-field": {"colour": "red"},
    "private-field": {"_hash": 3},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_invalid_dicts(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as raised:
        Problem.from_dict(PROBLEM.to_dict() | changes)
    assert len(str(raised.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts(8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(PROBLEM.to_dict())), JSON)
def test_any_value_in_any_field(name: str, value: Any) -> None:
    plain = PROBLEM.to_dict() | {name: value}
    try:
        found = Problem.from_dict(plain)
    except InvalidInput:
        return
    assert Problem.from_dict(found.to_dict()) == found
