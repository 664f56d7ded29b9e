"""Sequences that wait, in arrival order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from microbatch.core.policy import WaitingView
from microbatch.core.sequence import Sequence


class WaitingQueue:
    """Sorted by (arrival, seq_id): a preempted sequence that comes back goes before those that came after it."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}
        self._view: tuple[WaitingView, ...] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([self._sequences[seq_id] for _, seq_id in self._keys])

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place."""
        insort(self._keys, (sequence.arrival_time, sequence.seq_id))
        self._sequences[sequence.seq_id] = sequence
        self._view = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        self._keys.remove((sequence.arrival_time, sequence.seq_id))
        del self._sequences[sequence.seq_id]
        self._view = None

    def get(self, seq_id: int) -> Sequence:
        """The waiting sequence with this id."""
        return self._sequences[seq_id]

    def view(self) -> tuple[WaitingView, ...]:
        """What a policy sees of the queue. Made anew only when the queue has changed: a waiting sequence does not."""
        if self._view is None:
            self._view = tuple(
                WaitingView(
                    s.seq_id, s.arrival_time, s.num_tokens, s.request.priority, s.request.client, urgent=s.urgent
                )
                for s in self
            )
        return self._view

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when order and content disagree."""
        assert self._keys == sorted(self._keys), "waiting queue out of order"
        assert {seq_id for _, seq_id in self._keys} == set(self._sequences), "waiting queue lost a sequence"
        assert all(s.status.value == "waiting" for s in self._sequences.values()), "a sequence waits in a wrong state"

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)}>"
