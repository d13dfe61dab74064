"""The names that the package gives out."""

from __future__ import annotations

import pytest

import attn_dispatch

PUBLIC = [
    *(
        "AttnDispatchError",
        "BackendFailed",
        "Blocks",
        "Dense",
        "Dilated",
        "Explanation",
        "GroupMismatch",
        "InvalidInput",
    ),
    *(
        "Neighborhood",
        "NoBackend",
        "NotDecided",
        "Problem",
        "Ranges",
        "RankLost",
        "Reordered",
        "Sharded",
        "Window",
        "attend",
    ),
    "batch_invariant",
    *("counters", "explain", "from_order", "hardware", "merge", "positions", "profile", "record", "register"),
    *("replacing_sdpa", "shard", "shard_positions", "to_order", "unshard", "warm", "weights_of"),
]


def test_public_names() -> None:
    assert attn_dispatch.__all__ == PUBLIC
    assert all(getattr(attn_dispatch, name).__name__ == name for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(attn_dispatch))


def test_other_names() -> None:
    assert attn_dispatch.__version__.count(".") >= 1
    assert attn_dispatch.nn.MultiheadAttention.__module__ == "attn_dispatch.nn.attention"
    with pytest.raises(AttributeError, match="has no attribute 'atend'"):
        attn_dispatch.atend  # noqa: B018


@pytest.mark.parametrize("name", ["attend", "nn"])
def test_an_attribute_error_inside_a_module_is_the_cause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: str) -> None:
        raise AttributeError(f"{module} has no_such_name")

    monkeypatch.delitem(vars(attn_dispatch), name, raising=False)
    monkeypatch.setattr(attn_dispatch, "import_module", fails)
    with pytest.raises(ImportError, match=r"attn_dispatch\.\w+ cannot be imported: .*no_such_name") as caught:
        __import__("attn_dispatch", fromlist=[name])
    assert type(caught.value.__cause__) is AttributeError
