"""``serial``: one sequence at a time, first come first served. The baseline that batching is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from microbatch.core.policy import Decision, SchedulerView


@dataclass(frozen=True, slots=True)
class SerialPolicy:
    """Admits the oldest waiting sequence as soon as nothing runs."""

    name: ClassVar[str] = "serial"
    run_to_completion: ClassVar[bool] = True

    def decide(self, view: SchedulerView, now: float) -> Decision:
        """The oldest one; never a reason to wait."""
        if view.num_running or not view.waiting:
            return Decision()
        return Decision(admit=(view.waiting[0].seq_id,), reason="idle")

    def parameters(self) -> Mapping[str, float | int | str]:
        """None."""
        return {}
