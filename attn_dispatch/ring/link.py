"""The ranks that share a sequence: from what a caller passes as `mesh` to a process group that can be talked to."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.errors import BackendFailed, GroupMismatch, InvalidInput
from attn_dispatch.ring.engine.exchange import Wire, lost
from attn_dispatch.text import one_line

T = TypeVar("T")

PATIENCE = timedelta(days=1)

MOST_LINKS = 16  #: groups whose buffers are kept

_links: OrderedDict[Any, Link] = OrderedDict()
_lock = threading.Lock()

WORDS = 4  #: int64 numbers of a digest
LENGTH, FINE, KNOWN = range(WORDS, WORDS + 3)  #: what follows it


@dataclass(eq=False)
class Link:
    """A process group, this rank's place in it, and a group on the hosts' side for what is said rather than shipped.

    Args:
        known: what was decided for calls over it, the latest last.
    """

    group: Any
    wire: Wire
    known: OrderedDict[Any, Any] = field(default_factory=OrderedDict[Any, Any])

    @property
    def rank(self) -> int:
        return int(dist.get_rank(self.group))

    @property
    def size(self) -> int:
        return int(dist.get_world_size(self.group))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The kinds of devices whose tensors it ships. Of CUDA's, gloo has but a few collectives."""
        config = str(dist.get_backend_config(self.group))
        if ":" not in config:
            return ("cuda",) if config == "nccl" else ("cpu",)
        pairs = (part.split(":") for part in config.split(","))
        return tuple(kind for kind, way in pairs if (kind, way) != ("cuda", "gloo"))

    @cached_property
    def control(self) -> Any:
        """What is said goes over the hosts: reading it stops no GPU, and gloo notices at once that a peer is gone."""
        if "cpu" in self.devices:
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def numbers(self, mine: Tensor) -> Tensor:
        """Everybody's int64 [count] on the CPU, as [ranks, count].

        Raises:
            RankLost: a peer is gone, or did not answer within the group's time-out.
        """
        found = mine.new_empty(self.size, len(mine))
        self._do(lambda: dist.all_gather(list(found.unbind()), mine, group=self.control))
        return found

    def objects(self, mine: T) -> list[T]:
        """Everybody's object, by rank. Raises as `numbers`."""
        found: list[Any] = [None] * self.size
        self._do(lambda: dist.all_gather_object(found, mine, group=self.control))
        return found

    def rows(self, mine: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """Everybody's tensor [..., lengths[rank]], alike but for their last axis, by rank. Raises as `numbers`."""
        longest = max(lengths)
        padded = mine.new_zeros(*mine.shape[:-1], longest)
        padded[..., : mine.shape[-1]] = mine
        found = [torch.empty_like(padded) for _ in lengths]
        self._do(lambda: dist.all_gather(found, padded, group=self.group))
        return [x[..., :length] for x, length in zip(found, lengths)]

    def vote(self, error: Exception | None) -> None:
        """Go on only if every rank can.

        Raises:
            BackendFailed: another rank cannot, and this one can. RankLost: as `numbers`. Besides, `error` itself.
        """
        fine = self.numbers(torch.tensor([error is None], dtype=torch.int64)).flatten().tolist()
        if error is not None:
            raise error
        if not all(fine):
            failed = ", ".join(str(rank) for rank, each in enumerate(fine) if not each)
            raise BackendFailed(f"rank {failed} of the mesh failed in this call, and gradients need all of them")

    def barrier(self) -> None:
        """Until everybody is here. Raises as `numbers`."""
        self._do(lambda: dist.barrier(group=self.control))

    def _do(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise lost(error) from error

    @cached_property
    def host(self) -> str:
        return socket.gethostname()


def link_of(mesh: object) -> Link:
    """The link of a 1-D DeviceMesh, of a process group, or of "world": all ranks that were started together.

    Raises:
        InvalidInput: it is something else, or this process is not one of its ranks.
    """
    group = _group(mesh)
    with _lock:
        found = _links.get(group)
        if found is None:
            _drop([each for each in _links if _ended(each)])
            _drop(list(_links)[: max(0, len(_links) + 1 - MOST_LINKS)])
            found = _links[group] = Link(group, Wire(group))
    return found


def forget() -> None:
    """What was decided for calls over any group."""
    with _lock:
        for link in _links.values():
            link.known.clear()


process_state.register(process_state.ROUTES, forget)


def _drop(groups: Iterable[Any]) -> None:
    for group in groups:
        _links.pop(group).known.clear()  # which holds the link in turn: nothing would end it but the garbage collector


def _ended(group: Any) -> bool:
    """Whether it was destroyed. Who still holds it then keeps its threads and connections alive."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


@atexit.register
def _drop_all() -> None:
    """While there is a Python that a group's threads can come back to: later they would end the process by SIGABRT."""
    with _lock:
        _drop(list(_links))


def _group(mesh: object) -> Any:
    if mesh == "world":
        return _world()
    get_group = getattr(mesh, "get_group", None)
    if callable(get_group):
        if getattr(mesh, "ndim", 1) != 1:
            axes = getattr(mesh, "ndim", None)
            raise InvalidInput(f"mesh must have one dimension, got {axes}: name one, as in mesh['name']")
        return get_group()
    if isinstance(mesh, dist.ProcessGroup) and dist.get_rank(mesh) >= 0:
        return mesh
    # What new_group gives to processes outside the group is none.
    if isinstance(mesh, dist.ProcessGroup) or mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput("mesh is a process group that this process is not in")
    kinds = "a 1-D DeviceMesh, a process group, a Sharded or 'world'"
    raise InvalidInput(f"mesh must be {kinds}, got {type(mesh).__name__}")


def _world() -> Any:
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            missing = "torch.distributed is not initialized, and torchrun did not start this process"
            raise InvalidInput(f"mesh is 'world', but {missing}")
        dist.init_process_group()
    return dist.group.WORLD


@contextmanager
def world(device: str) -> Iterator[None]:
    """The ranks that torchrun has started, for commands: each takes the GPU of its number, and waits for as long as
    another one measures.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
        dist.barrier()  # who leaves first takes the others' connections along
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have said: the tokens of each, and whether they know one and the same decision."""

    lengths: tuple[int, ...]
    decided: bool


def agree(link: Link, asked: Mapping[str, Any], length: int, known: int, error: Exception | None = None) -> Agreed:
    """Compare a call with the other ranks'; a collective.

    Args:
        asked: what must be the same everywhere, by name, in plain values.
        length: this rank's tokens.
        known: a number for the decision that this rank would go by; 0 for none.
        error: why this rank cannot go on; it is raised after the others were told.

    Raises:
        GroupMismatch: on every rank, naming who asked for what. RankLost: a rank is gone, or did not take part in time.
    """
    digest = digest_of(asked) if error is None else (0,) * WORDS
    table = link.numbers(torch.tensor([*digest, length, error is None, known], dtype=torch.int64, device="cpu"))
    same = bool((table[:, :WORDS] == table[0, :WORDS]).all()) and bool(table[:, FINE].all())
    if not same:
        said = link.objects(dict(asked) if error is None else one_line(error))
        if error is not None:
            raise error
        raise GroupMismatch(_told(said))
    column = table[:, KNOWN]
    return Agreed(tuple(table[:, LENGTH].tolist()), bool(known and (column == known).all()))


def digest_of(value: Any) -> tuple[int, ...]:
    """256 bits of plain values, as int64 numbers."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 8 * WORDS, 8))


def _told(said: list[Any]) -> str:
    """Who said what, of what they do not agree on."""
    failed = [f"rank {rank}: {what}" for rank, what in enumerate(said) if isinstance(what, str)]
    if failed:
        return "\n  ".join(["a rank of the mesh cannot take part in this call:", *failed])
    lines = ["the ranks of the mesh do not ask for the same:"]
    for name in sorted({name for each in said for name in each}):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(said):
            by_value.setdefault(str(each.get(name)), []).append(rank)
        if len(by_value) > 1:
            parts = (f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"{name}: {', '.join(parts)}")
    return "\n  ".join(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
