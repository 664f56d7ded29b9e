"""``continuous``: sequences join and leave between steps, first come first served. Nothing waits for a batch to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from microbatch.core.policy import Decision, SchedulerView
from microbatch.errors import SetupError


@dataclass(frozen=True, slots=True)
class ContinuousPolicy:
    """Admits the oldest waiting sequences while fewer than ``max_num_seqs`` run. The scheduler's token budget decides
    how much of each prompt is fed in a step."""

    name: ClassVar[str] = "continuous"
    run_to_completion: ClassVar[bool] = False

    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        if type(self.max_num_seqs) is not int or self.max_num_seqs < 1:
            raise SetupError(f"max_num_seqs must be a whole number of at least 1, got {self.max_num_seqs!r}")

    def decide(self, view: SchedulerView, now: float) -> Decision:
        """As many as there is room for, at once."""
        room = max(0, self.max_num_seqs - view.num_running)
        return Decision(admit=tuple(w.seq_id for w in view.waiting[:room]), reason="idle")

    def parameters(self) -> Mapping[str, float | int | str]:
        """``max_num_seqs``."""
        return {"max_num_seqs": self.max_num_seqs}
