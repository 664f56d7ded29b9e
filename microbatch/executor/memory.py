"""How many blocks the store gets when nobody says."""

from __future__ import annotations

from pathlib import Path

import torch

from microbatch.errors import SetupError

#: Share of the device's memory that model and store may fill: the field keeps a fifth free for activations.
GPU_UTILIZATION = 0.80
#: Share of the free memory of a machine without GPU that the store may grow to. Pages cost nothing until written.
CPU_UTILIZATION = 0.50


def default_num_blocks(bytes_per_block: int, device: torch.device, wanted_blocks: int) -> int:
    """As many blocks as memory allows, at most ``wanted_blocks`` on a CPU. ``SetupError`` if not even two fit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        blocks = int(free - (1 - GPU_UTILIZATION) * total) // bytes_per_block
    else:
        blocks = min(wanted_blocks, int(CPU_UTILIZATION * available_memory()) // bytes_per_block)
    if blocks < 2:
        raise SetupError(
            f"no memory left for K/V blocks of {bytes_per_block / 2**20:.1f} MiB on {device}; use a smaller model,"
            " --quantization int8, or give the number of blocks with --kv-blocks"
        )
    return blocks


def available_memory() -> int:
    """Bytes that can be had on this machine without swapping, the limit of a container included."""
    available = _meminfo()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 * 2**30
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
