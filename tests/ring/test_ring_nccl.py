"""What ranks with GPUs rely on, without GPUs: the group of control messages beside NCCL, its communicator, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_dispatch import attend
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.exchange import Transport
from attn_dispatch.ring.link import Link
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from tests.support import ring_ranks
from tests.support.ring_calls import part
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("no_trials")

TIMEOUT_S = 3.0  #: of the process group
CUDA = torch.device("cuda:1")


@pytest.fixture
def three() -> Iterator[Ranks]:
    """Processes for one test: its groups would change the numbers of later ones."""
    made = Ranks(3, TIMEOUT_S)
    yield made
    made.close()


def link_without_cpu() -> Link:
    """The link of a group that sends only CUDA tensors."""
    group = ring_ranks.group()
    link = Link(group, Transport(group))
    link.__dict__["devices"] = ("cuda",)
    return link


def beside() -> tuple[Any, ...]:
    """A job: what the control group gathers where ranks are in different numbers of groups."""
    if ring_ranks.rank() < 2:
        dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
    link = link_without_cpu()
    rank = torch.tensor([link.rank])
    numbers = link.all_gather(rank).flatten().tolist()
    link.barrier()
    timeout = link.control.options._timeout.total_seconds()
    return numbers, link.all_gather_objects("x" * link.rank), timeout, link.control is link.group


def test_control_messages_beside_nccl(three: Ranks) -> None:
    """Groups that `new_group` numbers would differ between these ranks, which would wait for each other for ever."""
    assert three.everywhere(beside) == [([0, 1, 2], ["", "x", "xx"], TIMEOUT_S, False)] * 3


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made the current one."""
    found: list[torch.device] = []

    def device(each: torch.device) -> AbstractContextManager[None]:
        found.append(each)
        return nullcontext()

    monkeypatch.setattr("torch.cuda.device", device)
    return found


def test_all_ranks_make_the_communicator_once(entered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = torch.ones
    monkeypatch.setattr("torch.ones", lambda size, device: real(size))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group: calls.append((len(x), group)))
    link = Link("group", Transport("group"))
    for device in ("cpu", CUDA, CUDA):
        link.connect(torch.device(device))
    assert calls == [(1, "group")]
    assert entered == [CUDA]


def order_of_calls(order: str) -> list[str]:
    """A job: the collectives of a call, the first of each kind."""
    seen: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            seen.append(name)
            return call(*args, **more)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "connect", noted("connect", Link.connect))
        patch.setattr(Transport, "exchange", noted("rows", Transport.exchange))
        patch.setattr(ulysses, "_exchanged", noted("rows", ulysses._exchanged))
        mesh = ring_ranks.group()
        attend(*part(mesh), mesh=mesh, order=order)
    return list(dict.fromkeys(seen))


def test_the_communicator_is_made_before_rows_are_sent(ranks: Ranks) -> None:
    """Over NCCL, ranks without rows would be in no message that makes it, and the others would wait for them."""
    for order in (RING, GATHER, ULYSSES):
        assert ranks.everywhere(order_of_calls, order, ranks=2) == [["connect", "rows"]] * 2


def test_each_stream_has_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on another stream does not wait for the one that still sends from them."""
    stream, real = [1], torch.empty
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(cuda_stream=stream[0]))
    monkeypatch.setattr("torch.empty", lambda size, dtype, device: real(size, dtype=dtype))
    transport = Transport("group")
    first = transport.buffer(0, 8, torch.float32, CUDA)
    stream[0] = 2
    second = transport.buffer(0, 8, torch.float32, CUDA)
    stream[0] = 1
    again = transport.buffer(0, 8, torch.float32, CUDA)
    assert first.data_ptr() == again.data_ptr() != second.data_ptr()
