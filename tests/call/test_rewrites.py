"""Rewriters: what each makes of a call, and what explain() says of calls that consist of several."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import Dense, attend, explain, process_state
from attn_dispatch.calls import packing, rewrites, routes
from attn_dispatch.decisions.call import Rewritten
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.registry import LAST_RESORT
from attn_dispatch.spec.problem import Call
from tests.support import processes
from tests.support.calls import qkv
from tests.support.interpreted import INTERPRETED

pytestmark = pytest.mark.usefixtures("little_time")

Q, K, V = (x.expand(2, -1, -1, -1) for x in qkv())
LENGTH, HEADS = Q.shape[1:3]
PLAIN = Call(Q, K, V)
SINK = torch.zeros(HEADS)
IDS = torch.tensor([[0] * 6 + [1] * 10, [0] * 6 + [1] * 10])


def of(rewriter: Any, **arguments: Any) -> Rewritten:
    """What a rewriter makes of a call with these arguments."""
    found = rewriter(PLAIN._replace(**arguments))
    assert found is not None
    return found  # type: ignore[no-any-return]


def one(rewriter: Any, **arguments: Any) -> Call:
    (call,) = of(rewriter, **arguments).calls
    return call


def test_a_call_has_the_arguments_of_attend_with_its_defaults() -> None:
    parameters = inspect.signature(attend).parameters
    assert tuple(parameters) == Call._fields
    assert {name: x.default for name, x in parameters.items() if name not in "qkv"} == Call._field_defaults


def test_no_rewriter_changes_a_plain_call() -> None:
    assert [rewriter(PLAIN) for rewriter in rewrites.REWRITES] == [None] * len(rewrites.REWRITES)


def test_key_lens() -> None:
    found = of(packing.key_lens, q=Q[:, :1], key_lens=torch.tensor([9, 16]))
    assert [each.k.shape[:2] for each in found.calls] == [(1, 9), (1, 16)]
    assert found.join([Q[:1], Q[1:]]).shape == Q.shape


def test_as_operator() -> None:
    with FlopCounterMode(display=False):
        found = rewrites.as_operator(PLAIN)
        assert found is not None
        assert found.calls == []
        assert torch.allclose(found.join([]), attend(Q, K, V))


def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    with FlopCounterMode(display=False):  # a call of its own for each length
        assert [each.q.shape[:2] for each in of(packing.documents, documents=IDS).calls] == [(2, 6), (2, 10)]
    assert of(packing.documents, documents=IDS).calls == []
    for choice in (packing._choice, None):  # which is made once, also of no backend that takes all at once
        monkeypatch.setattr(packing, "_choice", choice)
        attend(Q, K, V, documents=IDS, backend="manual")


def test_in_transforms() -> None:
    backends = []

    def function(q: Any) -> Any:
        backends.append(one(rewrites.in_transforms, q=q).backend)
        return q

    transforms: Any = torch.func
    transforms.jvp(function, (Q,), (Q,))
    assert backends == [LAST_RESORT]


def test_a_route_serves_direct_and_rewritten_calls() -> None:
    """attend() writes out the key that routes.py makes of a call."""
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    several: list[dict[str, Any]] = [{}, {"key_mask": torch.ones(2, LENGTH) > 0}, {"softcap": 3.0}, {"bias": bias}]
    for masks in several:
        attend(Q, K, V, return_lse=True, **masks)
        count = len(routes.routes)
        attend(Q, K, V, sink=SINK, **masks)
        assert len(routes.routes) == count


HIT = """
import sys, torch
from attn_dispatch import attend
q, calls = torch.randn(1, 16, 2, 8), []
attend(q, q, q, backend="sdpa")
sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
attend(q, q, q, backend="sdpa")
sys.setprofile(None)
print(*calls)
"""


def test_a_hit_takes_few_functions() -> None:
    """In a process of its own: CPython 3.11 waits for ever where it profiles beside a thread that is to be ended."""
    calls = processes.run(HIT).stdout.split()
    assert "rewritten" not in calls
    assert 0 < len(calls) <= 7, calls


# --- explain ----------------------------------------------------------------------------------------------------------


def test_key_lens_are_explained() -> None:
    q, k, v = (torch.cat((x, x[:1])) for x in (Q[:, :1], K, V))
    found = explain(q, k, v, key_lens=torch.tensor([9, 16, 0]), backend="manual")
    assert [each.problem.count("[9, ") for each in (found, *found.others)] == [1, 0]
    assert str(found).count("problem ") == 2


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.usefixtures("triton_interpreter", "no_trials", "streams")
def test_key_lens_that_a_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, unread and clamped, with values of another width, and under autocast."""
    (q, k, v), lengths = (Q[:, :1], K, V[..., :3]), torch.tensor([9, 70])
    rows = (attend(q[n : n + 1], k[n : n + 1, :end], v[n : n + 1, :end]) for n, end in enumerate(lengths))
    wanted = torch.cat(list(rows))
    with monkeypatch.context() as patch:
        patch.setattr(packing, "read_on_host", None)
        found = explain(q, k, v, key_lens=lengths)
        assert (found.choice, found.others) == ("triton", ())
        assert torch.allclose(attend(q, k, v, key_lens=lengths), wanted, atol=1e-6)
        with torch.autocast("cpu", torch.float16):
            out = attend(q, k, v, key_lens=lengths)
        assert out.dtype == torch.float16
        assert torch.allclose(out.float(), wanted, atol=1e-2)
    ruled_out = iter([["triton"], []])  # by the trial
    monkeypatch.setattr(packing, "_takers", lambda *given: next(ruled_out))
    process_state.forget(process_state.ROUTES)
    for _ in range(2):
        assert torch.allclose(attend(q, k, v, key_lens=lengths.clamp(max=LENGTH)), wanted, atol=1e-6)


def test_documents_are_explained() -> None:
    """All at once as documents of the mean length, where a backend takes them so; else each length."""
    assert explain(Q, K, V, documents=IDS, backend="native").others == ()
    found = explain(Q, K, V, documents=IDS, backend="manual")
    assert len(found.others) == 1
    shape, on = (4096, 2, 8), torch.device("meta")
    x = torch.empty(1, *shape, device=on)
    assert explain(x, x, x, Dense(), cu_seqlens=torch.tensor([0, 96, 4096])).choice


def test_sinks_alignments_and_widths_are_explained() -> None:
    assert "lse" in explain(Q, K, V, sink=SINK).problem
    assert "left=None" not in explain(Q, K, V, is_causal=True, alignment="upper_left").problem
    assert explain(Q, K, V[..., :3]).choice
    with pytest.raises(InvalidInput, match="q must have at least one entry"):
        explain(Q[:, :0], K, V)
