"""What no step can be faster than on this machine: its bytes over the read bandwidth, its sums over the GEMM rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Floor(NamedTuple):
    """Measured once, with all threads of torch."""

    read_gb_per_s: float
    peak_gflop_per_s: float

    @classmethod
    def measure(cls) -> Floor:
        """Best of many: a sum over 400 MB, and float32 products of 2048 x 2048."""
        large = torch.ones(100_000_000)
        a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
        return cls(large.nbytes / _best(large.sum) / 1e9, 2 * 2048**3 / _best(lambda: a @ b) / 1e9)

    def best(self, other: Floor) -> Floor:
        """The higher of each rate: what disturbs a measurement only lowers it."""
        return Floor(*map(max, zip(self, other, strict=True)))

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The longer of reading so much and computing so much."""
        return max(num_bytes / self.read_gb_per_s, flops / self.peak_gflop_per_s) / 1e9


def _best(run: Callable[[], object], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)
