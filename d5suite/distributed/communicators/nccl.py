"""NCCL, torch's transport between CUDA devices. It was tested only with Gloo in NCCL's place.

Tensors on the device, and whatever else has DLPack, are moved as they are; NumPy arrays go to the
device and back. NCCL has neither tags nor a source ANY: two ranks' messages keep their order.

Imports torch, as a transport only, NumPy, `d5suite.errors`, `d5suite.levels` and the algorithms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore

from d5suite.distributed.algorithms import ALGORITHMS, DEFAULTS
from d5suite.distributed.communicators.gloo import alone_in, as_bytes, as_tensor, met, named
from d5suite.distributed.network import named_interface
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import ANY, Collective, Communicator, Request

_opened = itertools.count()
# Newer releases of torch have these under other names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Deferred(Request):
    """A message that starts together with all waiting ones: one by one, NCCL's would deadlock."""

    def __init__(self, of: NcclCommunicator, peer: int, array: np.ndarray, tensor: torch.Tensor, comes: bool) -> None:
        self.rank, self.peer, self.tensor, self.comes = of.rank, peer, tensor, comes
        self._with, self._array, self._work = of, array, None

    def operation(self, tag: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv if self.comes else dist.isend, self.tensor, self.peer, self._with.group, tag)

    def started(self, work: Any) -> None:
        self._work = work

    @named
    def _wait(self) -> int:
        self._with.start()
        if self._work is not None:
            self._work.wait()
            if self.comes:
                back(self._array, self.tensor)
            self._work = None
        return self.peer


class NcclCommunicator(Communicator):
    """Torch's global process group, over NCCL."""

    name = "nccl"

    def __init__(
        self, algorithm: str, rank: int, size: int, meeting: Path, timeout_s: float,
        hosts: Sequence[str] | None = None, *, backend: str = "nccl", device: str | None = None,
    ) -> None:  # fmt: skip
        if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigurationError("NCCL needs a CUDA device and a torch for CUDA", hint="Choose gloo or mpi.")
        self._meeting = meeting
        store, found = met(meeting / f"nccl{next(_opened)}", rank, size, timeout_s)
        self._store: FileStore | None = store
        neighbours = [other for other in range(size) if found[other] == found[rank]]
        if device is None:
            device = f"cuda:{neighbours.index(rank) % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        self._device = torch.device(device)
        super().__init__(rank, size, hosts or found, algorithm, ALGORITHMS[algorithm])
        self._waiting: list[tuple[_Deferred, int]] = []
        if dist.is_initialized():
            raise D5Error(f"rank {rank} has another process group of torch", hint="Close it first.")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        self.group = dist.group.WORLD
        self.network = {"transport": backend.upper(), **named_interface(["NCCL_SOCKET_IFNAME"])}

    def close(self) -> None:
        """Destroy the process group; the last rank's store removes the file."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None
        with alone_in(self._meeting):
            self._store = None

    def start(self) -> None:
        """Start the messages that wait, together."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            works = dist.batch_isend_irecv([request.operation(tag) for request, tag in waiting])
            # Messages that NCCL joins have one work.
            for index, (request, _) in enumerate(waiting):
                request.started(works[min(index, len(works) - 1)])

    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        self._isend(array, to, tag)._wait()

    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        return self._ireceive(array, source, tag)._wait()

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return self._deferred(array, to, tag, comes=False)

    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        if source == ANY:
            raise D5Error("NCCL receives from a named rank only", hint="Choose mpi or gloo for this scheme.")
        return self._deferred(array, source, tag, comes=True)

    def _deferred(self, array: np.ndarray, peer: int, tag: int, comes: bool) -> Request:
        request = _Deferred(self, peer, array, self._there(array, as_bytes), comes)
        self._waiting.append((request, tag))
        return request

    def _there(self, array: np.ndarray, seen: Any) -> torch.Tensor:
        """Return the array on the device; ``seen`` makes a tensor of a NumPy array."""
        if isinstance(array, np.ndarray):
            there: torch.Tensor = seen(array).to(self._device)
            return there
        return torch.from_dlpack(array)

    def _chosen(self, call: str, array: np.ndarray) -> Collective | None:
        chosen = super()._chosen(call, array)
        ragged = call in ("reduce_scatter", "all_gather") and array.size % self.size
        return DEFAULTS[call] if chosen is None and ragged else chosen

    @named
    def _native(self, call: str, array: np.ndarray, **more: Any) -> None:
        self.start()
        group = self.group
        if call == "barrier":
            there = self._there(np.zeros(1, np.uint8), as_bytes)
            dist.all_reduce(there, group=group)
            back(np.zeros(1, np.uint8), there)
            return
        sums = call in ("all_reduce", "reduce", "reduce_scatter")
        there = self._there(array, as_tensor if sums else as_bytes).reshape(-1)
        result = array
        if call == "all_reduce":
            dist.all_reduce(there, group=group)
        elif call == "reduce":
            dist.reduce(there, more["root"], group=group)
        elif call == "broadcast":
            dist.broadcast(there, more["root"], group=group)
        elif call == "all_to_all":
            result, taken = more["taken"], torch.empty_like(there)
            dist.all_to_all_single(taken, there, group=group)
            there = taken
        else:
            own = there.chunk(self.size)[self.rank] if there.numel() else there
            if call == "reduce_scatter":
                total = torch.empty_like(own)
                _reduce_scatter(total, there, group=group)
                own.copy_(total)
            else:
                _all_gather(there, own.clone(), group=group)
        back(result, there)


def back(array: np.ndarray, there: torch.Tensor) -> None:
    """Wait for the device, and copy the result into the array, unless it is there already."""
    if there.is_cuda:
        torch.cuda.current_stream().synchronize()
    if isinstance(array, np.ndarray):
        flat = there.reshape(-1).cpu().view(torch.uint8).numpy() if there.numel() else np.empty(0, np.uint8)
        array.reshape(-1).view(np.uint8)[:] = flat
    elif there.data_ptr() != torch.from_dlpack(array).data_ptr():
        torch.from_dlpack(array).copy_(there.view_as(torch.from_dlpack(array)))


connect = NcclCommunicator
