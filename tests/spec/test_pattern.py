"""Patterns against the definition in plain Python integers, one query and key at a time."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support.definition import KINDS, SPECS, Spec, dense, dilated, masks, neighborhoods, slid, windows

# --- multiplicity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [dense(), windows(), dilated(), neighborhoods()], ids=list(KINDS))
def test_multiplicity_is_the_definition(specs: st.SearchStrategy[Spec]) -> None:
    @given(specs)
    def holds(spec: Spec) -> None:
        found = spec.pattern.multiplicity(*spec.lengths)
        assert found.dtype == torch.int32
        assert found.tolist() == spec.multiplicity()

    holds()


@given(st.data(), SPECS)
def test_masks_hide_keys_and_padding_queries(data: st.DataObject, spec: Spec) -> None:
    seq_lens, key_mask = data.draw(masks(spec))
    found = spec.pattern.multiplicity(
        *spec.lengths,
        seq_lens=None if seq_lens is None else torch.tensor(seq_lens),
        key_mask=None if key_mask is None else torch.tensor(key_mask),
    )
    plain = spec.multiplicity()
    if seq_lens is None and key_mask is None:
        assert found.tolist() == plain
        return
    for row in range(len(found)):
        length = spec.k_len + spec.q_len if seq_lens is None else seq_lens[row]
        visible = [j < length and (key_mask is None or key_mask[row][j]) for j in range(spec.k_len)]
        expected = [
            [[c if i < length and visible[j] else 0 for j, c in enumerate(keys)] for i, keys in enumerate(queries)]
            for queries in plain
        ]
        assert found[row].tolist() == expected


@given(st.data(), SPECS)
def test_positions_select_rows_and_columns(data: st.DataObject, spec: Spec) -> None:
    def some(size: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))

    heads, queries, keys = some(spec.heads), some(spec.q_len), some(spec.k_len)
    found = spec.pattern.multiplicity(*spec.lengths, h_pos=heads, q_pos=torch.tensor(queries), k_pos=torch.tensor(keys))
    whole = spec.multiplicity()
    assert found.tolist() == [[[whole[h][i][j] for j in keys] for i in queries] for h in heads]


@given(SPECS)
def test_simplify_keeps_the_multiplicity(spec: Spec) -> None:
    simple = spec.pattern.simplify(*spec.lengths)
    assert simple.multiplicity(*spec.lengths).tolist() == spec.multiplicity()
    assert simple.simplify(*spec.lengths) == simple


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        (Window(7, None), Dense()),
        (Window(7, 0), Dense(is_causal=True)),
        (Window(6, 3), Window(6, 3)),
        (Window(100, 3), Window(None, 3)),
        (Window(3, 0, 3), Window(3, 0, 3)),
        (Window(3, 0, 4), Dense(is_causal=True)),
        (Window(None, 3, 4), Window(None, 3)),
        (Dilated((8,), (1,), is_causal=True), Dense(is_causal=True)),
        (Dilated((9,), (1,), heads="split"), Dense()),
        (Dilated((99, 4), (2, 1)), Dilated((8, 4), (2, 1))),
        (Dilated((4, 8), (1, 2), offsets="block"), Dilated((4, 8), (1, 2))),
        (Neighborhood((8,), (15,)), Dense()),
        (Neighborhood((8,), (5,), is_causal=True), Window(2, 0)),  # type: ignore[arg-type]
        (Neighborhood((8,), (5,), edges="shift"), Neighborhood((8,), (5,), edges="shift")),
    ],
    ids=str,
)
def test_simplify_finds_the_simplest(pattern: Pattern, simple: Pattern) -> None:
    assert pattern.simplify(8, 8, 2) == simple


# --- values -----------------------------------------------------------------------------------------------------------

NUMBER = np.int64
SAME: list[tuple[Pattern, Pattern]] = [
    (Window(np.int32(3), NUMBER(0)), Window(3, 0)),  # type: ignore[arg-type]
    (Dilated([8, 16], [1, 2]), Dilated((8, 16), (1, 2))),  # type: ignore[arg-type]
    (Dilated(np.array([8, 16]), (NUMBER(1), NUMBER(2))), Dilated((8, 16), (1, 2))),  # type: ignore[arg-type]
    (Dilated(torch.tensor([8, 16]), (1, 2)), Dilated((8, 16), (1, 2))),  # type: ignore[arg-type]
    (Dilated(8, 2), Dilated((8,), (2,))),  # type: ignore[arg-type]
    (Dilated((x for x in (8, 16)), range(1, 3)), Dilated((8, 16), (1, 2))),  # type: ignore[arg-type]
    (Dilated((16, 8), (2, 1)), Dilated((8, 16), (1, 2))),
    (Dilated((8, 16), (1, 1), offsets="block"), Dilated((8, 16), (1, 1))),
    (Dilated((8, 16), (1, 2), heads="split", offsets="block"), Dilated((8, 16), (1, 2), heads="split")),
    (Neighborhood([4, 6], 3), Neighborhood((4, 6), (3, 3), (1, 1), (False, False))),  # type: ignore[arg-type]
    (Neighborhood((4, 6), (3,), NUMBER(2), True), Neighborhood((4, 6), (3, 3), (2, 2), (True, True))),  # type: ignore[arg-type]
    (Neighborhood((4, 6), (3, 99), is_causal=[True, False]), Neighborhood((4, 6), (3, 11), is_causal=(True, False))),  # type: ignore[arg-type]
    (Neighborhood((9,), (99,), (2,)), Neighborhood((9,), (9,), (2,))),
    (Neighborhood(7, 3), Neighborhood((7,), (3,))),  # type: ignore[arg-type]
    (
        Neighborhood((4, 6), (4,), edges="shift", stride=[NUMBER(2)]),  # type: ignore[arg-type]
        Neighborhood((4, 6), (4,), edges="shift", stride=(2, 2)),
    ),
]
DIFFERENT: list[tuple[Pattern, Pattern]] = [
    (Dense(), Dense(is_causal=True)),
    (Window(None, 0), Window(0, None)),
    (Window(3, 0), Window(3, 0, 1)),
    (Dilated((16, 8), (2, 1), heads="split"), Dilated((8, 16), (1, 2), heads="split")),
    (Dilated((16, 8), (1, 2)), Dilated((8, 16), (1, 2))),
    (Dilated((8,), (2,)), Dilated((8,), (2,), offsets="block")),
    (Dilated((8, 8), (2, 2)), Dilated((8,), (2,))),
    (Neighborhood((9,), (3,)), Neighborhood((9,), (3,), edges="shift")),
    (Neighborhood((3, 9), (3,)), Neighborhood((9, 3), (3,))),
    (Neighborhood((9,), (3,), edges="shift"), Neighborhood((9,), (3,), edges="shift", stride=(2,))),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_equal_values(one: Pattern, other: Pattern) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == str(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=str)
def test_different_values(one: Pattern, other: Pattern) -> None:
    assert one != other
    assert str(one) != str(other)


@given(SPECS)
def test_frozen_hashable_picklable(spec: Spec) -> None:
    pattern = spec.pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert type(pattern)(**dataclasses.asdict(pattern)) == pattern  # type: ignore[call-overload]
    assert {pattern: 1}[spec.pattern] == 1
    field = dataclasses.fields(pattern)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(pattern, field, 1)


# --- invalid arguments ------------------------------------------------------------------------------------------------

PAIR = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("Dense", {"is_causal": 1}, "is_causal must be True or False, got 1"),
    ("Window", {"left": -1}, "left must be None or an integer >= 0, got -1"),
    ("Window", {"right": -2}, "right must be None or an integer >= 0, got -2"),
    ("Window", {"left": True}, "left must be None or an integer >= 0, got True"),
    ("Window", {"right": "3"}, "right must be None or an integer >= 0, got '3'"),
    ("Window", {"right": np.array([1, 2])}, "right must be None or an integer >= 0, got"),
    ("Window", {"right": torch.tensor(1.5)}, "right must be None or an integer >= 0, got"),
    ("Window", {"sinks": -1}, "sinks must be an integer >= 0, got -1"),
    ("Dilated", PAIR | {"segment_lengths": (8, 0)}, "segment_lengths must be integers >= 1, got 0"),
    ("Dilated", PAIR | {"segment_lengths": (8, 16.0)}, "segment_lengths must be integers >= 1, got 16.0"),
    ("Dilated", PAIR | {"segment_lengths": "16"}, "segment_lengths must be integers >= 1, got '16'"),
    ("Dilated", PAIR | {"segment_lengths": None}, "segment_lengths must be integers >= 1, got None"),
    ("Dilated", PAIR | {"dilation_rates": (1, 0)}, "dilation_rates must be integers >= 1, got 0"),
    ("Dilated", PAIR | {"dilation_rates": []}, "dilation_rates must hold at least one integer, got []"),
    ("Dilated", PAIR | {"dilation_rates": (1,)}, "segment_lengths has 2 entries and dilation_rates 1"),
    ("Dilated", PAIR | {"is_causal": "yes"}, "is_causal must be True or False, got 'yes'"),
    ("Dilated", PAIR | {"offsets": "random"}, "offsets must be one of 'mod', 'block', got 'random'"),
    ("Dilated", PAIR | {"heads": "some"}, "heads must be one of 'all', 'split', got 'some'"),
    ("Neighborhood", {"grid": (2, 2, 2, 2), "window": 1}, "grid has 4 axes, but may have 1 to 3: (2, 2, 2, 2)"),
    ("Neighborhood", {"grid": (4, 0), "window": 1}, "grid must be integers >= 1, got 0"),
    (
        "Neighborhood",
        {"grid": (4, 4), "window": (3, 4)},
        "window must be odd on every axis, got (3, 4): even ones need edges='shift'",
    ),
    (
        "Neighborhood",
        {"grid": (4, 4), "window": 3, "stride": (1, 2)},
        "stride must be 1 on every axis, got (1, 2): others need edges='shift'",
    ),
    (
        "Neighborhood",
        {"grid": (8, 8), "window": (4, 3), "edges": "shift", "stride": 4},
        "stride must be from 1 to the window on every axis, got 4 > 3",
    ),
    ("Neighborhood", {"grid": (4, 4), "window": 3, "stride": 0}, "stride must be integers >= 1, got 0"),
    ("Neighborhood", {"grid": (4, 4), "window": 0}, "window must be integers >= 1, got 0"),
    ("Neighborhood", {"grid": (4, 4), "window": (3, 3, 3)}, "window has 3 entries, but grid has 2 axes"),
    ("Neighborhood", {"grid": (4, 4), "window": 3, "dilation": -1}, "dilation must be integers >= 1, got -1"),
    ("Neighborhood", {"grid": (4, 4, 4), "window": 3, "dilation": (1, 2)}, "dilation has 2 entries, but grid has 3"),
    ("Neighborhood", {"grid": (4, 4), "window": 3, "is_causal": (True, 1)}, "is_causal must be True or False, got 1"),
    ("Neighborhood", {"grid": (4, 4, 4), "window": 3, "is_causal": (True, False)}, "is_causal has 2 entries"),
    (
        "Neighborhood",
        {"grid": (4, 4), "window": 3, "edges": "wrap"},
        "edges must be one of 'clip', 'shift', got 'wrap'",
    ),
    (
        "Neighborhood",
        {"grid": (8, 4), "window": 3, "dilation": (1, 2), "edges": "shift"},
        "edges='shift' needs window * dilation <= grid on every axis, got 3 * 2 > 4",
    ),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"), BAD, ids=[f"{kind}-{message[:40]}" for kind, _, message in BAD]
)
def test_wrong_arguments(kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        KINDS[kind](**arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "q_len", "k_len", "message"),
    [
        (Dilated((4,), (2,)), 9, 8, "Dilated needs q_len <= k_len, got 9 and 8"),
        (Neighborhood((2, 4), (1,)), 9, 8, "Neighborhood needs q_len <= k_len, got 9 and 8"),
        (Neighborhood((2, 4), (1,)), 8, 9, "grid (2, 4) holds 8 tokens, but the sequence has 9"),
        (Neighborhood((2, 4), (1,)), 9, 9, "grid (2, 4) holds 8 tokens, but the sequence has 9"),
    ],
)
def test_invalid_lengths(pattern: Pattern, q_len: int, k_len: int, message: str) -> None:
    for call in (pattern.check, pattern.multiplicity):
        with pytest.raises(InvalidInput) as raised:
            call(q_len, k_len)
        assert message in str(raised.value)


# --- even windows and strides -----------------------------------------------------------------------------------------

Axis = tuple[int, int, int, int]  #: size, window, dilation, stride


def seen_on(axis: Axis, causal: bool) -> list[list[int]]:
    size, window, dilation, stride = axis
    pattern = Neighborhood((size,), (window,), (dilation,), (causal,), "shift", (stride,))
    return [row.nonzero().flatten().tolist() for row in pattern.multiplicity(size)[0]]


@pytest.mark.parametrize("causal", [False, True])
def test_every_short_axis(causal: bool) -> None:
    """Every query sees itself, too: `kernels/hidden.py` relies on it."""
    for size in range(1, 13):
        for dilation in range(1, size + 1):
            for window in range(1, size // dilation + 1):
                for stride in range(1, window + 1):
                    axis = size, window, dilation, stride
                    found = seen_on(axis, causal)
                    assert found == slid(*axis, causal), axis
                    assert all(x in keys for x, keys in enumerate(found)), axis
