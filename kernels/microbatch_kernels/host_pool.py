"""Host memory behind the store: whole blocks go out to it and come back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch

from microbatch_kernels.store import zeros

Pairs = Sequence[tuple[int, int]]


class HostPool:
    """``num_blocks`` blocks of host memory for each of ``pools``, tensors on any device that are indexed by block.

    Blocks are copied as they are, so the type of their numbers does not matter. For pools on a GPU the memory is
    page-locked, and copies go in the order of the device's other work without anybody waiting for them.
    """

    def __init__(self, pools: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pools = [_as_words(pool) for pool in pools]
        self._host = [_host_memory(num_blocks, pool) for pool in self._pools]

    @classmethod
    def of_size(cls, pools: Sequence[torch.Tensor], num_bytes: int) -> HostPool:
        """As many blocks as fit into ``num_bytes``."""
        return cls(pools, num_bytes // sum(pool[0].nbytes for pool in pools))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block)."""
        for device_ids, first, end in _runs([(host, device) for device, host in pairs]):
            for pool, host in zip(self._pools, self._host, strict=True):
                index = torch.tensor(device_ids, device=pool.device)
                host[first:end].copy_(pool.index_select(0, index), non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block)."""
        for device_ids, first, end in _runs(pairs):
            for pool, host in zip(self._pools, self._host, strict=True):
                index = torch.tensor(device_ids, device=pool.device)
                pool.index_copy_(0, index, host[first:end].to(pool.device, non_blocking=True))

    def __repr__(self) -> str:
        mib = sum(host.nbytes for host in self._host) / 2**20
        return f"<HostPool {self.num_blocks} blocks, {mib:.0f} MiB>"


def _runs(pairs: Pairs) -> Iterator[tuple[list[int], int, int]]:
    """(host block, device block) pairs as runs of host blocks that lie together: device blocks, first host block and
    end."""
    device_ids: list[int] = []
    end = 0
    for host_id, device_id in sorted(pairs):
        if device_ids and host_id != end:
            yield device_ids, end - len(device_ids), end
            device_ids = []
        device_ids.append(device_id)
        end = host_id + 1
    if device_ids:
        yield device_ids, end - len(device_ids), end


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """A pool as rows of whole numbers, a block a row, in the widest words that fit: torch copies element by element."""
    rows: torch.Tensor = pool.flatten(1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


def _host_memory(num_blocks: int, pool: torch.Tensor) -> torch.Tensor:
    """Memory that costs nothing until it is written, or page-locked memory for a GPU: registered, because what torch
    allocates page-locked is rounded up to a power of two."""
    memory = zeros((num_blocks, pool.shape[1]), pool.dtype, torch.device("cpu"))
    if pool.device.type == "cuda" and num_blocks:  # pragma: no cover - needs a GPU
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
