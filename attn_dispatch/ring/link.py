"""The ranks that share a sequence: the process group of a `mesh` argument, and collectives over it."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pickle
import socket
import time
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
from torch.autograd.function import once_differentiable

from attn_dispatch import private, process_state
from attn_dispatch.errors import AttnDispatchError, BackendFailed, GroupMismatch, InvalidInput
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.machine.devices import current_device
from attn_dispatch.ring.engine.exchange import Transport, lost
from attn_dispatch.text import one_line

T = TypeVar("T")
Runs = tuple[tuple[range, ...], ...]  #: by rank, the places of its tokens in a sequence

TIMEOUT = timedelta(days=1)  #: time-out of the groups of `world`

RELEASE_S = 0.02  #: before the interpreter ends

_links: dict[Any, Link] = {}  #: by group
_lock = process_state.lock()

DIGEST_SIZE = 4  #: int64 numbers
LENGTH, NO_ERROR, DECISION = range(DIGEST_SIZE, DIGEST_SIZE + 3)  #: columns after the digest


@dataclass(eq=False)
class Link:
    """A process group, this rank's number in it, and what its ranks have set up together: kept as long as the
    group, since ranks that set it up again at different times would wait.

    Args:
        decisions: for calls over this group, latest last.
        on_cuda: whether all ranks have taken part in a collective with CUDA tensors.
    """

    group: Any
    transport: Transport
    decisions: OrderedDict[Any, Any] = field(default_factory=OrderedDict[Any, Any])
    on_cuda: bool = False

    @property
    def rank(self) -> int:
        return int(dist.get_rank(self.group))

    @property
    def size(self) -> int:
        return int(dist.get_world_size(self.group))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The device types whose tensors the group sends. Not CUDA with gloo, which lacks most collectives there."""
        config = str(dist.get_backend_config(self.group))
        if ":" not in config:
            return ("cuda",) if config == "nccl" else ("cpu",)
        pairs = (part.split(":") for part in config.split(","))
        return tuple(kind for kind, way in pairs if (kind, way) != ("cuda", "gloo"))

    @cached_property
    def control(self) -> Any:
        """A group for CPU tensors: reading those does not stall a GPU, and gloo reports a lost peer at once."""
        return self.group if "cpu" in self.devices else _gloo_beside(self.group)

    def connect(self, device: torch.device) -> None:
        """Before the first messages between CUDA devices: a collective of all ranks, which makes NCCL's communicator.

        Point-to-point messages would make it too, but wait for ranks that have none to send. Raises as
        `all_gather`.
        """
        if device.type != "cuda" or self.on_cuda:
            return
        with current_device(device):
            one = torch.ones(1, device=device)
            self._raising_rank_lost(lambda: dist.all_reduce(one, group=self.group))
        self.on_cuda = True

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather a tensor [count] on the CPU from every rank, as [ranks, count].

        Raises:
            RankLost: a rank has exited, or did not answer within the group's time-out.
        """
        found = values.new_empty(self.size, len(values))
        # Called on the group itself: the functions of torch.distributed take registered groups only.
        self._raising_rank_lost(lambda: self.control.allgather([list(found.unbind())], [values]).wait())
        return found

    def all_gather_objects(self, value: T) -> list[T]:
        """Gather an object from every rank, by rank. Raises as `all_gather`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(data)], device="cpu")).flatten().tolist()
        found = self.all_gather(torch.nn.functional.pad(data, (0, max(lengths) - len(data))))
        return [pickle.loads(bytes(each[:length].tolist())) for each, length in zip(found, lengths)]

    def all_gather_ragged(self, shard: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """Gather a tensor [..., lengths[rank]] from every rank; other axes are equal. Raises as `all_gather`."""
        longest = max(lengths)
        padded = shard.new_zeros(*shard.shape[:-1], longest)
        padded[..., : shard.shape[-1]] = shard
        found = [torch.empty_like(padded) for _ in lengths]
        with current_device(padded.device):
            self._raising_rank_lost(lambda: dist.all_gather(found, padded, group=self.group))
        return [x[..., :length] for x, length in zip(found, lengths)]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of equally large tensors of all ranks. Raises as `all_gather`."""
        total = x.contiguous().clone()
        with current_device(x.device):
            self._raising_rank_lost(lambda: dist.all_reduce(total, group=self.group))
        return total

    def raise_if_any_failed(self, error: Exception | None) -> None:
        """Return only if no rank has an error; a collective.

        Raises:
            Exception: `error`, if given. BackendFailed: only other ranks have an error. RankLost: as
                `all_gather`.
        """
        own = torch.tensor([error is None], dtype=torch.int64, device="cpu")
        no_error = self.all_gather(own).flatten().tolist()
        if error is not None:
            raise error
        if not all(no_error):
            failed = ", ".join(str(rank) for rank, each in enumerate(no_error) if not each)
            raise BackendFailed(f"rank {failed} of the mesh failed in this call, which needs every rank")

    def barrier(self) -> None:
        """Wait until every rank has called this. Raises as `all_gather`."""
        self.all_gather(torch.zeros(1, dtype=torch.int64, device="cpu"))

    def _raising_rank_lost(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise lost(error) from error

    @cached_property
    def host(self) -> str:
        return socket.gethostname()


def link_of(mesh: object) -> Link:
    """The link of a 1-D DeviceMesh, of a process group, or of "world": all ranks that torchrun started.

    Raises:
        InvalidInput: it is something else, or this process is not one of its ranks.
    """
    group = _group(mesh)
    with _lock:
        found = _links.get(group)
        if found is None:
            _drop([each for each in _links if _ended(each)])
            found = _links[group] = Link(group, Transport(group))
    return found


def forget() -> None:
    """Drop the decisions for calls over all groups."""
    with _lock:
        for link in _links.values():
            link.decisions.clear()


process_state.register(process_state.ROUTES, forget)


def _drop(groups: Iterable[Any]) -> None:
    for group in groups:
        _links.pop(group).decisions.clear()  # its values refer to the link: a cycle


def _ended(group: Any) -> bool:
    """Whether the group was destroyed. A reference to it still keeps its threads and connections alive."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


@atexit.register
def _drop_all() -> None:
    """Drop all groups before the interpreter ends: their threads would abort the process later (SIGABRT)."""
    with _lock:
        used = bool(_links)
        _drop(list(_links))
    if used:
        # PyTorch itself may hold the default group (as a default argument in torch.distributed.nn). A thread of it
        # that waits for the interpreter's lock, to release the tensors of the last collective, gets it here.
        time.sleep(RELEASE_S)


def _gloo_beside(group: Any) -> Any:
    """A gloo group of a group's ranks, under the group's own name.

    `new_group` would number it: ranks that are in different numbers of groups would wait for different ones.
    """
    ranks = dist.get_process_group_ranks(group)
    name = f"attn_dispatch/{group.group_name}/{digest_of(ranks)[0]}"
    c10d: Any = dist.distributed_c10d
    default_store = private.of_torch("torch.distributed.distributed_c10d:_get_default_store")
    store = c10d.PrefixStore(name, default_store())
    backend_of = getattr(group, "_get_backend", lambda device: None)
    options = getattr(backend_of(torch.device("cuda")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)  # where it tells
    return dist.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), timeout)


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
    # new_group returns NON_GROUP_MEMBER, which is no group, to processes outside the group.
    if isinstance(mesh, dist.ProcessGroup) or mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput("mesh is a process group that does not contain this process")
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
    """Initialize the ranks that torchrun started, for commands: each uses the GPU of its local rank; the time-out
    is TIMEOUT, since ranks wait while another one measures.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield
        dist.barrier()  # a rank that exits first closes connections that others still use
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of `agree`: the tokens of each rank, and whether all ranks have the same decision."""

    lengths: tuple[int, ...]
    same_decision: bool


def agree(
    link: Link, arguments: Mapping[str, Any], length: int, decision_id: int, error: Exception | None = None
) -> Agreement:
    """Compare this call with the other ranks' calls; a collective.

    Args:
        arguments: those that must be equal on all ranks, by name, in plain values.
        length: number of this rank's tokens.
        decision_id: identifies this rank's decision; 0 for none.
        error: why this rank cannot take part; raised after the other ranks have received it.

    Raises:
        GroupMismatch: on every rank, with the arguments of each. RankLost: a rank has exited, or did not answer in
            time.
    """
    digest = digest_of(arguments) if error is None else (0,) * DIGEST_SIZE
    row = torch.tensor([*digest, length, error is None, decision_id], dtype=torch.int64, device="cpu")
    table = link.all_gather(row)
    same = bool((table[:, :DIGEST_SIZE] == table[0, :DIGEST_SIZE]).all()) and bool(table[:, NO_ERROR].all())
    if not same:
        answers = link.all_gather_objects(dict(arguments) if error is None else one_line(error))
        if error is not None:
            raise error
        raise GroupMismatch(_differences(answers))
    column = table[:, DECISION]
    return Agreement(tuple(table[:, LENGTH].tolist()), bool(decision_id and (column == decision_id).all()))


@contextmanager
def errors_sent(link: Link) -> Iterator[None]:
    """Send what is wrong with this rank's arguments to the other ranks, which would wait for it, and raise it."""
    try:
        yield
    except AttnDispatchError as error:
        agree(link, {}, 0, 0, error)
        raise


class Gathered(torch.autograd.Function):
    """x [..., tokens] of every rank as [..., all tokens]; `runs`: by rank, the places of its tokens.

    The gradient of x is its part of this rank's gradient, or with `sums` of the sum of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, runs: Runs, sums: bool) -> Tensor:
        ctx.link, ctx.runs, ctx.sums = link, runs, sums
        lengths = tuple(sum(map(len, own)) for own in runs)
        whole = x.new_empty(*x.shape[:-1], sum(lengths))
        for part, own in zip(link.all_gather_ragged(x.contiguous(), lengths), runs):
            for run, some in zip(own, torch.split(part, list(map(len, own)), -1)):
                whole[..., run.start : run.stop] = some  # by slices: indices would be copied to a GPU
        return whole

    @staticmethod
    @once_differentiable  # linear: the backward pass depends on the incoming gradient alone
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        total = ctx.link.all_reduce(grad.to(sum_dtype(grad.dtype))) if ctx.sums else grad
        own = torch.cat([total[..., run.start : run.stop] for run in ctx.runs[ctx.link.rank]], -1)
        return own.to(grad.dtype), None, None, None


def gathered(x: Tensor, link: Link, runs: Runs, axis: int, *, sums: bool) -> Tensor:
    """All ranks' tokens along an axis of x, in new memory; a collective. See `Gathered`."""
    found: Tensor = Gathered.apply(x.movedim(axis, -1), link, runs, sums)  # type: ignore[no-untyped-call]
    return found.movedim(-1, axis)


def digest_of(value: Any) -> tuple[int, ...]:
    """256 bits of plain values, as int64 numbers."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 8 * DIGEST_SIZE, 8))


def _differences(answers: list[Any]) -> str:
    """The arguments that differ, with the ranks that gave each value; or the errors of ranks."""
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(answers) if isinstance(each, str)]
    if failed:
        return "\n  ".join(["a rank of the mesh cannot take part in this call:", *failed])
    lines = ["the ranks of the mesh give different arguments:"]
    for name in sorted({name for each in answers for name in each}):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(answers):
            by_value.setdefault(str(each.get(name)), []).append(rank)
        if len(by_value) > 1:
            parts = (
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in by_value.items()
            )
            lines.append(f"{name}: {', '.join(parts)}")
    return "\n  ".join(lines)
