"""Layouts, rows to send and receive, and parts, without processes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.engine.parts import Part, Source
from attn_dispatch.ring.engine.steps import steps_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.needs import kv_classes
from attn_dispatch.ring.rows.traffic import Traffic, positions_of, traffic_of
from attn_dispatch.spec.orders import GATHER, RING, Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from tests.support.calls import NO_NUMBERS
from tests.support.pairwise import crossed, thinned
from tests.support.ring_calls import blocks_of

pytestmark = pytest.mark.usefixtures("little_time")

LONGNET = Dilated((16, 32, 64), (1, 2, 4))
# Pattern, tokens, heads, kv_heads.
SHARED: tuple[tuple[Pattern, int, int, int], ...] = (
    (Dense(), 37, 2, 1),
    (Dense(True), 101, 2, 2),
    (Window(7, 0), 61, 2, 2),
    (Window(3, 5), 61, 2, 1),
    (Window(None, 4), 50, 1, 1),
    (Window(7, 0, 5), 61, 2, 2),
    (Window(3, 2, 30), 61, 2, 1),
    (LONGNET, 150, 4, 4),
    (LONGNET, 128, 8, 2),
    (Dilated((16, 32), (2, 2), True), 101, 4, 2),
    (Dilated((10, 35), (3, 4), True), 101, 6, 3),
    (Dilated((32, 64), (2, 4), offsets="block"), 150, 6, 2),
    (Dilated((16, 32, 64), (1, 2, 4), True, heads="split"), 150, 7, 7),
    (Dilated((16,), (4,)), 70, 2, 2),
    (Dilated((3,), (8,), True), 40, 8, 8),
    (Dilated((16,), (1,), True), 64, 4, 2),
    (Neighborhood((60,), (9,), (2,)), 60, 2, 1),
    (Neighborhood((9, 7), (3, 5)), 63, 2, 2),
    (Neighborhood((9, 8), (3, 3), (2, 1), (True, False), "shift"), 72, 1, 1),
    (Neighborhood((9, 8), (4, 3), (2, 1), (True, False), "shift", (3, 2)), 72, 2, 1),
    (Neighborhood((4, 3, 5), (3, 3, 3)), 60, 2, 2),
    (Reordered(Neighborhood((9, 8), (3, 3)), "hilbert"), 72, 2, 1),
    (Reordered(Dilated((16, 32), (2, 4), True), "residue"), 101, 4, 4),
    (Reordered(Window(9, 0), "hilbert"), 70, 1, 1),
)
IDS = [f"{pattern}-{tokens}-{heads}-{kv_heads}" for pattern, tokens, heads, kv_heads in SHARED]


def layouts(tokens: int) -> tuple[Layout, ...]:
    """Few and many ranks, even and uneven shards, one of them of a single token."""
    lengths = (deal(tokens, 2), deal(tokens, 3, (1, 5, 2)), (1, *deal(tokens - 1, 4)))
    return tuple(Layout(each, kind) for each, kind in product(lengths, KINDS))


def problem_of(pattern: Pattern, tokens: int, heads: int, kv_heads: int) -> Problem:
    """A problem with head_dim >= tokens, for `_add`."""
    shape = 1, tokens, heads, -(-tokens // 16) * 16
    return Case("", pattern, shape, kv_heads=kv_heads).problem(torch.float32, needs_grad=False)


def needed(pattern: Pattern, layout: Layout, heads: int, kv_heads: int, rank: int) -> Tensor:
    """Bool [kv_heads, tokens]: the key rows that this rank's queries see, from the definition."""
    own = positions_of(layout, rank)
    counts = pattern.multiplicity(layout.tokens, heads=heads, q_pos=own)
    return (counts > 0).any(1).view(kv_heads, heads // kv_heads, layout.tokens).any(1)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 1, 2, 7), (1, 1), (3,)], ids=str)
def test_every_token_is_on_one_rank(kind: str, lengths: tuple[int, ...]) -> None:
    layout = Layout(lengths, kind)
    found = [positions_of(layout, rank) for rank in range(layout.ranks)]
    assert [len(positions) for positions in found] == list(lengths)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(sum(lengths)))
    assert all(bool((positions.diff() > 0).all()) for positions in found)


def test_chunks_of_layouts() -> None:
    assert Layout((3, 2), CONTIGUOUS).chunks == ((range(3),), (range(3, 5),))
    assert Layout((4, 3, 1), ZIGZAG).chunks == ((range(2), range(6, 8)), (range(2, 4), range(5, 6)), (range(4, 5),))


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ((10, 4), (3, 3, 2, 2)),
        ((12, 3, (1, 2, 1)), (3, 6, 3)),
        ((100, 2, (0.55, 0.45)), (55, 45)),
        ((10, 2, (3, 1)), (8, 2)),
        ((10, 2, (1e308, 1e308)), (5, 5)),
        ((77, 3, None, 8), (24, 24, 29)),
        ((64, 3, (1, 2, 5), 8), (8, 16, 40)),
        ((5, 1), (5,)),
    ],
)
def test_deal(arguments: tuple[Any, ...], lengths: tuple[int, ...]) -> None:
    assert deal(*arguments) == lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3), "2 tokens over 3 ranks leave rank 2 none"),
        ((63, 8, None, 16), "63 tokens over 8 ranks in multiples of 16 leave rank 3 none"),
        ((100, 2, (1000, 1)), "leave rank 1 none"),
        ((10, 2, (1, 2, 3)), "weights must be 2 positive numbers"),
        ((10, 2, (1, 0)), r"weights must be .* got \(1, 0\)"),
        *(((10, 2, (1, each)), "weights must be") for each in (None, float("inf"), *NO_NUMBERS)),
    ],
)
def test_deal_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        deal(*arguments)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "tokens", "heads", "kv_heads"), SHARED, ids=IDS)
def test_each_needed_row_is_sent_and_received_once_and_no_other(
    pattern: Pattern, tokens: int, heads: int, kv_heads: int
) -> None:
    for layout in layouts(tokens):
        traffic = [traffic_of(pattern, layout, heads, kv_heads, rank) for rank in range(layout.ranks)]
        for rank, each in enumerate(traffic):
            received = torch.zeros(kv_heads, tokens, dtype=torch.int64)
            for rows in (rows for peer in each.receives.values() for rows in peer):
                for head in rows.heads:
                    received[head] += torch.bincount(rows.positions, minlength=tokens)
            expected = needed(pattern, layout, heads, kv_heads, rank).long()
            expected[:, each.own] = 0
            assert torch.equal(received, expected)
        for sender, receiver in product(range(layout.ranks), repeat=2):
            assert _message(traffic[sender], receiver, sends=True) == _message(traffic[receiver], sender, sends=False)
        for each in traffic:
            for rows in (rows for peer in each.sends.values() for rows in peer):
                assert torch.equal(each.own[rows.local], rows.positions)


def _message(traffic: Traffic, peer: int, sends: bool) -> list[tuple[range, list[int]]]:
    """Heads and positions, in the order of the message."""
    rows = (traffic.sends if sends else traffic.receives).get(peer, ())
    assert all(each.count for each in rows)
    return [(each.heads, each.positions.tolist()) for each in rows]


def test_key_heads_that_see_the_same_rows_are_one_class() -> None:
    """Heads 0 and 4 have one offset, and so on: one message instead of two."""
    members = [heads for heads, _ in kv_classes(Dilated((32,), (4,)), 8, 8)]
    assert members == [range(0, 8, 4), range(1, 8, 4), range(2, 8, 4), range(3, 8, 4)]
    assert [heads for heads, _ in kv_classes(Dense(True), 8, 2)] == [range(2)]


# --- work -------------------------------------------------------------------------------------------------------------


@thinned(("pattern", "tokens", "heads", "kv_heads"), SHARED, 6, IDS)
def test_parts_add_up_to_the_definition(pattern: Pattern, tokens: int, heads: int, kv_heads: int) -> None:
    problem = problem_of(pattern, tokens, heads, kv_heads)
    for layout, exchange in zip(layouts(tokens), (RING, GATHER, GATHER, RING, RING, GATHER)):
        for rank in range(layout.ranks):
            own = positions_of(layout, rank)
            found = torch.zeros(heads, len(own), tokens, dtype=torch.int32)
            for step in steps_of(problem, layout, rank, exchange):
                for part in step.parts:
                    _add(found, part, step.sources[part.source])
            assert torch.equal(found, pattern.multiplicity(tokens, heads=heads, q_pos=own))


@crossed(lambda case, rows: {"rows": rows}, lambda case, rows: case not in SHARED[1::12], case=SHARED, rows=(3, 8))
def test_blocks_add_up_to_the_definition(case: tuple[Pattern, int, int, int], rows: int) -> None:
    with blocks_of(rows):
        test_parts_add_up_to_the_definition(*case)


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_is_a_small_part_of_a_shard(kind: str) -> None:
    """Sender and receiver have equal numbers of messages, also with unequal shards."""
    problem = problem_of(Dense(True), 256, 2, 2)
    layout = Layout(deal(256, 3, (1.0, 4.0, 3.0)), kind)
    with blocks_of(4):
        steps = [steps_of(problem, layout, rank, RING) for rank in range(3)]
    assert len({len(each) for each in steps}) == 1
    for rank, each in enumerate(steps):
        for number, step in enumerate(each):
            assert all(rows.count <= 2 * 8 for several in step.sends.values() for rows in several)
            for peer, several in step.receives.items():
                sent = steps[peer][number].sends[rank]
                assert [rows.positions.tolist() for rows in several] == [rows.positions.tolist() for rows in sent]
            assert all(max(part.problem.q_len, part.problem.k_len) <= 8 for part in step.parts)


def _add(found: Tensor, part: Part, source: Source) -> None:
    """Add the number of times that each query of a part sees each key to `found` [heads, rows of the shard, tokens].

    The part computes it: with scores of 0 and a unit vector of v for each key, out is the counts over their sum.
    """
    heads, rows = torch.arange(found.shape[0])[part.heads], torch.arange(found.shape[1])[part.rows]
    keys, problem = source.positions[part.keys], part.problem
    assert (problem.heads, problem.q_len, problem.k_len) == (len(heads), len(rows), len(keys))
    q = torch.zeros(1, len(rows), len(heads), problem.head_dim)
    k = torch.zeros(1, len(keys), problem.kv_heads, problem.head_dim)
    v = torch.eye(problem.head_dim)[keys][None, :, None].expand(k.shape).contiguous()
    out, lse = part.call(None).forward(q, k, v)
    counts = out * lse.transpose(1, 2).exp()[..., None]
    assert (counts - counts.round()).abs().max() < 1e-2
    found[heads[:, None], rows] += counts[0].movedim(1, 0)[..., : found.shape[2]].round().int()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_runs_are_slices_with_dense_patterns(kind: str) -> None:
    """No part of a causal sequence is computed by position, and all parts together have few pairs that are not seen."""
    problem = problem_of(Dense(True), 256, 2, 2)
    layout = Layout(deal(256, 4), kind)
    pairs = 0
    for rank in range(4):
        parts = [part for step in steps_of(problem, layout, rank, RING) for part in step.parts]
        assert all(isinstance(part.rows, slice) and isinstance(part.problem.pattern, Dense) for part in parts)
        pairs += sum(part.problem.q_len * part.problem.k_len for part in parts)
    assert pairs <= 256 * 256 * 5 / 8
