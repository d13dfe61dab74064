"""A short run of the trials in tools/checks/trust_store.py, and that they detect losses and mutations."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attn_dispatch.store.decision import Damaged, Decision
from attn_dispatch.store.folder import Store
from tools.checks import trust_store


def test_no_decision_is_lost_and_no_wrong_one_accepted() -> None:
    found = trust_store.figures(quick=True)
    assert found["killed"]["kills"] > 0
    assert found == {
        "killed": {
            "processes": 2,
            "decisions": 40,
            "kills": found["killed"]["kills"],
            "lost": 0,
            "parse_errors": 0,
        },
        "mutated": {"mutations": 2000, "crashes": 0, "wrong_accepted": 0},
    }


def test_a_lost_decision_is_detected(tmp_path: Path) -> None:
    for number in (0, 4):
        Store(tmp_path).put(trust_store.made(3, number))
    shared, other = trust_store.made(3, 0), trust_store.made(3, 4 * 8)
    assert trust_store._is_stored(Store(tmp_path), shared)
    assert shared.key == other.key
    assert not trust_store._is_stored(Store(tmp_path), other)
    (path,) = tmp_path.rglob(f"{shared.key}.json")
    assert trust_store._is_whole(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert not trust_store._is_whole(path)
    assert not trust_store._is_stored(Store(tmp_path), shared)


@pytest.mark.parametrize("mutation", trust_store.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mutation_is_detected(mutation: trust_store.Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reader that accepts whatever can be parsed and raises other errors for the rest."""

    def credulous(content: bytes) -> Decision:
        plain = msgspec.json.decode(content)
        if not isinstance(plain, dict):
            raise Damaged
        plain.pop("checksum", None)
        return msgspec.convert(plain, Decision)

    monkeypatch.setattr(trust_store, "MUTATIONS", (mutation,))
    assert trust_store.mutate_files(300) == {"mutations": 300, "crashes": 0, "wrong_accepted": 0}
    monkeypatch.setattr(trust_store, "decode", credulous)
    found = trust_store.mutate_files(300)
    assert found["crashes"] + found["wrong_accepted"] > 0
