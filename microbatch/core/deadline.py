"""When a request's time is over."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from microbatch.core.sequence import Sequence
from microbatch.errors import DeadlineError, QueueDeadlineError


def next_deadline(sequences: SequenceABC[Sequence]) -> float | None:
    """The moment at which a request must end: its own deadline, or that of the queue while nothing of it has
    started."""
    request = sequences[0].request
    if any(s.first_scheduled_time is not None for s in sequences):
        return request.deadline
    return earliest(request.deadline, request.queue_deadline)


def deadline_error(sequences: SequenceABC[Sequence], now: float) -> DeadlineError:
    """What to tell the client of a request that expired at ``now``."""
    request = sequences[0].request
    waited = now - request.arrival_time
    if request.deadline is not None and now >= request.deadline:
        return DeadlineError(f"the request was not done after {waited:.1f} s")
    return QueueDeadlineError(f"the request waited {waited:.1f} s in the queue without being started", retry_after=1)


def earliest(a: float | None, b: float | None) -> float | None:
    """The smaller of two times, None standing for never."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
