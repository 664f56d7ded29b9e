"""The requests in flight: their sequences, and when their time is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as SequenceABC

from microbatch.core.deadline import earliest, next_deadline
from microbatch.core.sequence import Sequence


class RequestTable:
    """Knows a request from its arrival until the last of its sequences has ended."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._timed: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sequences))

    def add(self, sequences: SequenceABC[Sequence]) -> None:
        """A request, by its sequences."""
        request = sequences[0].request
        self._sequences[request.request_id] = list(sequences)
        if request.deadline is not None or request.queue_deadline is not None:
            self._timed.add(request.request_id)

    def open_sequences(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended; empty when it is unknown."""
        return [s for s in self._sequences.get(request_id, ()) if not s.finished]

    def leader(self, sequence: Sequence) -> Sequence:
        """The first choice of the sequence's request."""
        return self._sequences[sequence.request.request_id][0]

    def note_end(self, sequence: Sequence) -> bool:
        """One sequence has ended; True when it was the last of its request, which is forgotten then."""
        request_id = sequence.request.request_id
        if not all(s.finished for s in self._sequences[request_id]):
            return False
        del self._sequences[request_id]
        self._timed.discard(request_id)
        return True

    def expired(self, now: float) -> list[list[Sequence]]:
        """All sequences of each request whose time is over at ``now``."""
        late = []
        for request_id in self._timed:
            deadline = next_deadline(self._sequences[request_id])
            if deadline is not None and now >= deadline:
                late.append(self._sequences[request_id])
        return late

    def next_deadline(self) -> float | None:
        """When the next request expires, if none ends before."""
        soonest: float | None = None
        for request_id in self._timed:
            soonest = earliest(soonest, next_deadline(self._sequences[request_id]))
        return soonest
