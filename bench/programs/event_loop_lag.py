"""How late an event loop runs what is due: a task that wants to run every few milliseconds and notes how late it is."""

from __future__ import annotations

import asyncio
import time

_EVERY_S = 0.002


class EventLoopLag:
    """``figures`` starts a new measurement and gives the one before it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._lags: list[float] = []

    def figures(self) -> dict[str, float]:
        """p50, p99 and the worst in milliseconds since the last call; nothing at the first one."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        lags, self._lags = sorted(self._lags), []
        if not lags:
            return {}
        at = {"p50_ms": len(lags) // 2, "p99_ms": len(lags) * 99 // 100, "max_ms": -1}
        return {name: round(lags[index] * 1e3, 2) for name, index in at.items()}

    async def figures_soon(self) -> dict[str, float]:
        """The same, for a route."""
        return self.figures()

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_EVERY_S)
            self._lags.append(max(0.0, time.perf_counter() - began - _EVERY_S))
