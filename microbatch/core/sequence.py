"""One answer in flight: a request, or one of its ``n`` choices, and how far it has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from microbatch.core.request import FinishReason, Request, SamplingParams


class SequenceStatus(enum.Enum):
    """WAITING sequences hold no blocks (a preempted one waits again); RUNNING ones do; FINISHED ones never change."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress is one counter: ``num_computed_tokens`` = K/V is written for positions [0, n).

    Prefill, prefix hit, decode and recompute are all "feed tokens [n, m)". Times are seconds on the engine's clock.
    """

    seq_id: int
    request: Request
    index: int
    seed: int
    max_total_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def arrival_time(self) -> float:
        """When the request arrived; a preempted sequence keeps it, so it comes first again."""
        return self.request.arrival_time

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output tokens, in order."""
        return self.request.prompt_token_ids + tuple(self.output_token_ids)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.seq_id} {self.status.value} prompt={self.num_prompt_tokens}"
            f" output={len(self.output_token_ids)} computed={self.num_computed_tokens}>"
        )
