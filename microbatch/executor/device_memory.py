"""How much memory a device has, how much of it is free, and how much a piece of work takes at its peak."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import torch

#: For a machine that does not tell.
_UNKNOWN: Final = 4 * 2**30


class DeviceMemory(Protocol):
    """All numbers are bytes."""

    def total(self) -> int:
        """What there is."""
        ...

    def free(self) -> int:
        """What nobody uses now."""
        ...

    def room(self, utilization: float) -> int:
        """What may still be filled when so large a share may be used; negative when more is in use already."""
        ...

    def reset_peak(self) -> None:
        """Begin to watch."""
        ...

    def peak(self) -> int | None:
        """The most that was taken since ``reset_peak``, on top of what was taken then. None: it cannot be seen."""
        ...


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory that tensors on this device live in."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class CudaMemory:
    """A GPU's memory. It is ours and other processes', so the share is one of the whole."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def total(self) -> int:
        """What the GPU has."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """What no process uses; what torch only keeps for reuse is given back first."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def room(self, utilization: float) -> int:
        """The share of the whole, less what is in use, whoever uses it."""
        return int(utilization * self.total()) - (self.total() - self.free())

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        """Of torch's own tensors, since ``reset_peak``."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before


class HostMemory:
    """A machine's memory, within the limits of the container that this process is in.

    ``root`` is where ``/proc`` and ``/sys`` are found.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before: int | None = None

    def total(self) -> int:
        """What the machine has, or the container may use."""
        return min([self._meminfo("MemTotal"), *(limit for limit, _ in self._limits())])

    def free(self) -> int:
        """What can be had without swapping: file pages that can be dropped count as free."""
        return min([self._meminfo("MemAvailable"), *(max(0, limit - used) for limit, used in self._limits())])

    def room(self, utilization: float) -> int:
        """The share of what is free: a machine's memory has other users, whose part of the whole is not ours to plan
        with."""
        return int(utilization * self.free())

    def reset_peak(self) -> None:
        """Give back what is only kept for reuse, so that its reuse is seen, and begin to watch."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._before = None
        try:
            (self._root / "proc/self/clear_refs").write_text("5")
            self._before = self._resident_peak()
        except OSError:  # not allowed in some containers
            pass

    def peak(self) -> int | None:
        """Growth of the most memory that this process had resident."""
        return None if self._before is None else max(0, self._resident_peak() - self._before)

    def _resident_peak(self) -> int:
        lines = (self._root / "proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)

    def _meminfo(self, name: str) -> int:
        try:
            lines = (self._root / "proc/meminfo").read_text().splitlines()
        except OSError:
            return _UNKNOWN
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), _UNKNOWN)

    def _limits(self) -> Iterator[tuple[int, int]]:
        """Limit and use of every control group around this process, of version 2 and 1."""
        groups = self._root / "sys/fs/cgroup"
        yield from self._walk(groups, "", ("memory.max", "memory.current", "inactive_file"))
        usages = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from self._walk(groups / "memory", "memory", usages)

    def _walk(self, mount: Path, controller: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
        own = mount / self._group(controller).lstrip("/")
        for folder in (own, *own.parents):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _statistic(folder / "memory.stat", names[2])
            if folder == mount:
                return

    def _group(self, controller: str) -> str:
        """Path of this process's group; in a container it may be one of the host's, which is not there then."""
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return ""
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" and for a file that is not there."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
