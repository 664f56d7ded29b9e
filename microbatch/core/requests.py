"""The requests in flight: their sequences, and when their time is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as SequenceABC

from microbatch.core.deadline import earliest, next_deadline
from microbatch.core.sequence import Sequence


class RequestTable:
    """Knows a request from its arrival until the last of its sequences has ended."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._timed: dict[str, None] = {}
        self._soonest: float | None = None
        self._stale = False

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sequences))

    def add(self, sequences: SequenceABC[Sequence]) -> None:
        """A request, by its sequences."""
        request = sequences[0].request
        self._sequences[request.request_id] = list(sequences)
        if request.deadline is not None or request.queue_deadline is not None:
            self._timed[request.request_id] = None
            self._stale = True

    def open_sequences(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended; empty when it is unknown."""
        return [s for s in self._sequences.get(request_id, ()) if not s.finished]

    def choices(self, sequence: Sequence) -> list[Sequence]:
        """All sequences of this one's request."""
        return self._sequences[sequence.request.request_id]

    def note_started(self) -> None:
        """Sequences were scheduled for the first time: the deadline of the queue no longer holds for them."""
        self._stale = True

    def note_end(self, sequence: Sequence) -> bool:
        """One sequence has ended; True when it was the last of its request, which is forgotten then."""
        request_id = sequence.request.request_id
        if not all(s.finished for s in self._sequences[request_id]):
            return False
        del self._sequences[request_id]
        if request_id in self._timed:
            del self._timed[request_id]
            self._stale = True
        return True

    def expired(self, now: float) -> list[list[Sequence]]:
        """All sequences of each request whose time is over at ``now``."""
        soonest = self.next_deadline()
        if soonest is None or now < soonest:
            return []
        requests = [self._sequences[request_id] for request_id in self._timed]
        return [r for r in requests if (deadline := next_deadline(r)) is not None and now >= deadline]

    def next_deadline(self) -> float | None:
        """When the next request expires, if none ends before. Looked up only when something has changed."""
        if self._stale:
            self._stale = False
            self._soonest = None
            for request_id in self._timed:
                self._soonest = earliest(self._soonest, next_deadline(self._sequences[request_id]))
        return self._soonest
