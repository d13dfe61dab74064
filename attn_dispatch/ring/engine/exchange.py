"""Batched point-to-point messages of rows, with reused buffers and a count of the bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch.errors import RankLost
from attn_dispatch.machine.devices import current_device
from attn_dispatch.ring.rows.traffic import Rows
from attn_dispatch.spec.problem import Problem


@dataclass
class Transport:
    """Sends and receives tensors over a process group, and keeps the buffers for them.

    Args:
        group: the ranks that share a sequence.
        bytes_sent: by this rank, since it was last set to 0.
        buffers: flat tensors by slot, dtype, device and CUDA stream: work on one stream does not wait for another's.
    """

    group: Any
    bytes_sent: int = 0
    buffers: dict[tuple[int, torch.dtype, torch.device, int], Tensor] = field(default_factory=dict)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> PendingExchange:
        """Start to send and to receive flat contiguous tensors, by peer; in use until `PendingExchange.wait`."""
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in sorted(tensors.items())
            if tensor.numel()
        ]
        self.bytes_sent += sum(tensor.numel() * tensor.itemsize for tensor in sends.values())
        try:
            with current_device(operations[0].tensor.device) if operations else nullcontext():
                works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise lost(error) from error
        return PendingExchange(works, sends, receives)

    def buffer(self, slot: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of `size` entries; it reuses the memory of earlier calls for the slot, if large enough."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = slot, dtype, device, stream
        found = self.buffers.get(key)
        if found is None or len(found) < size:
            with torch.inference_mode(False):  # the next call may be in another mode
                found = self.buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return found[:size]

    def release(self) -> None:
        """Drop the buffers."""
        self.buffers.clear()


@dataclass
class PendingExchange:
    """Messages that were started. References to their tensors are kept until `wait` returns."""

    works: list[Any]
    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]

    def wait(self) -> None:
        """Wait until every message has been sent and received.

        Raises:
            RankLost: a peer has exited, or did not answer within the group's time-out.
        """
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(error) from error
        self.works = []


def lost(error: Exception) -> RankLost:
    return RankLost(f"a rank of the mesh is gone, or did not answer in time: {' '.join(str(error).split())[:300]}")


def message_size(rows: int, problem: Problem) -> int:
    """Entries of a message of k and v, or of their gradients, of `rows` rows of one key head."""
    return 2 * problem.batch * problem.head_dim * rows


def pack(first: Tensor, second: Tensor, rows: Sequence[Rows], into: Tensor) -> Tensor:
    """Copy rows of two tensors [batch, tokens, kv_heads, head_dim], such as k and v, to a flat one."""
    for each, views in zip(rows, unpack(into, rows, first.shape[0], first.shape[3])):
        for x, view in zip((first, second), views):
            torch.index_select(x[:, :, _slice(each.heads)], 1, each.local, out=view)
    return into


def unpack(flat: Tensor, rows: Sequence[Rows], batch: int, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Views of a message: k and v [batch, rows, heads, head_dim] for each of `rows`."""
    found, start = [], 0
    for each in rows:
        size = batch * each.count * head_dim
        pair = flat[start : start + 2 * size].view(2, batch, len(each.local), len(each.heads), head_dim)
        found.append((pair[0], pair[1]))
        start += 2 * size
    return found


def add_returned(totals: Sequence[Tensor], flat: Tensor, rows: Sequence[Rows]) -> None:
    """Add gradients of rows that this rank sent, which another rank computed, to dk and dv."""
    for each, views in zip(rows, unpack(flat, rows, totals[0].shape[0], totals[0].shape[3])):
        for total, view in zip(totals, views):
            total[:, :, _slice(each.heads)].index_add_(1, each.local, view)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop, heads.step)
