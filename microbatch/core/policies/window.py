"""``window``: a batch closes at ``max_batch_size``, or ``window_ms`` after its oldest arrival, whichever is first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from microbatch.core.policy import Decision, SchedulerView
from microbatch.errors import SetupError


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """The window belongs to the oldest waiting sequence: later arrivals never restart it, a running batch does not
    delay it.

    A sequence that waited through the run of another batch has spent its window there and goes at once. An urgent one
    closes the batch that it is in.
    """

    name: ClassVar[str] = "window"
    run_to_completion: ClassVar[bool] = True

    max_batch_size: int = 8
    window_ms: float = 50.0

    def __post_init__(self) -> None:
        if type(self.max_batch_size) is not int or self.max_batch_size < 1:
            raise SetupError(f"max_batch_size must be a whole number of at least 1, got {self.max_batch_size!r}")
        if type(self.window_ms) not in (int, float) or not 0 <= self.window_ms <= 60_000:
            raise SetupError(f"window_ms must be from 0 to 60000 milliseconds, got {self.window_ms!r}")

    def decide(self, view: SchedulerView, now: float) -> Decision:
        """Close by size, by window or, when nothing more will come, at once; else wake at the end of the window."""
        if view.num_running or not view.waiting:
            return Decision()
        batch = tuple(w.seq_id for w in view.waiting[: self.max_batch_size])
        if len(batch) == self.max_batch_size:
            return Decision(admit=batch, reason="size")
        closes_at = min(w.arrival_time for w in view.waiting) + self.window_ms / 1000
        if now >= closes_at:
            return Decision(admit=batch, reason="window")
        if any(w.urgent for w in view.waiting[: self.max_batch_size]):
            return Decision(admit=batch, reason="idle")
        if view.draining:
            return Decision(admit=batch, reason="drain")
        return Decision(wake_at=closes_at)

    def parameters(self) -> Mapping[str, float | int | str]:
        """``max_batch_size`` and ``window_ms``."""
        return {"max_batch_size": self.max_batch_size, "window_ms": self.window_ms}
