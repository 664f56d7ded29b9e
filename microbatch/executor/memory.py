"""How many blocks the store gets when nobody says: what the device has left beside weights and activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from microbatch.errors import SetupError
from microbatch.executor.device_memory import DeviceMemory, HostMemory
from microbatch.executor.packing import packed_tensors
from microbatch.executor.profiling import StepProfile
from microbatch_kernels.store import KVStore


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What the settings say of the pool. ``max_blocks``: no more than this is of use (None: the more the better)."""

    utilization: float
    block_size: int
    bytes_per_token: int
    max_blocks: int | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * self.bytes_per_token


def pool_blocks(memory: DeviceMemory, wish: PoolWish, profile: StepProfile, weights: int) -> int:
    """As many blocks as the room that is left holds, the null block not counted. ``SetupError`` with the numbers when
    there is none."""
    room = memory.room(wish.utilization) - profile.activations
    blocks = room // wish.bytes_per_block - 1
    if blocks < 1:
        raise SetupError(
            f"no memory left for K/V blocks of {size(wish.bytes_per_block)}: of {size(memory.total())},"
            f" {size(memory.free())} are free beside weights of {size(weights)}, a share of {wish.utilization:g} may be"
            f" used, and {profile.step} needs {size(profile.activations)}; raise --memory-utilization, lower"
            f" {profile.step.setting}, use a smaller model or --quantization, or give the number of blocks with"
            " --kv-blocks"
        )
    return blocks if wish.max_blocks is None else min(blocks, wish.max_blocks)


def pool_text(store: KVStore, max_model_len: int) -> str:
    """The pool in words, for the log."""
    tokens = store.num_blocks * store.block_size
    return (
        f"K/V pool {size(store.num_blocks * store.bytes_per_block)}: {store.num_blocks} blocks of {store.block_size},"
        f" {tokens} tokens of {store.bytes_per_token} bytes; room for {tokens / max_model_len:.1f} sequences of"
        f" {max_model_len} tokens"
    )


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights and buffers, packed ones included, tied ones once."""
    tensors = [*model.parameters(), *model.buffers(), *packed_tensors(model)]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def available_memory() -> int:
    """Bytes that can be had on this machine without swapping, the limit of a container included."""
    return HostMemory().free()


def size(num_bytes: int) -> str:
    """Bytes for people."""
    if abs(num_bytes) < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if abs(num_bytes) < 2**30 else f"{num_bytes / 2**30:.2f} GiB"
