"""The sequences that hold K/V blocks: who comes in, who must go when blocks run out, what is computed."""

from __future__ import annotations

from collections.abc import Mapping

from microbatch.core.counters import SchedulerCounters
from microbatch.core.ports import KVManager
from microbatch.core.sequence import Sequence, SequenceStatus


class Residents:
    """``sequences`` in the order they came in. Every one of them has a block table, and no other sequence has one."""

    def __init__(self, kv: KVManager, counters: SchedulerCounters) -> None:
        self.sequences: list[Sequence] = []
        self._kv = kv
        self._counters = counters
        self._released: list[int] = []
        self._to_pin: set[str] = set()

    @property
    def has_released(self) -> bool:
        """Whether sequences have left that the executor does not know of yet."""
        return bool(self._released)

    def take_released(self) -> tuple[int, ...]:
        """The ids of those that have left since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Give a sequence blocks for all of its tokens, its cached prefix shared. False, and nothing changes, when
        there are not enough."""
        token_ids = sequence.token_ids()
        cached = self._kv.begin(sequence.seq_id, token_ids, len(token_ids), sequence.request.cache_salt)
        if cached is None:
            return False
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = cached
        self._counters.prefix_query_tokens += len(token_ids)
        self._counters.prefix_hit_tokens += cached
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            sequence.num_cached_tokens = cached
        self.sequences.append(sequence)
        return True

    def grow(self, counts: Mapping[int, int]) -> list[Sequence]:
        """Make room for what each sequence is fed. When blocks run out the latest arrivals are taken out; they are
        returned, waiting again: what was computed of them is computed again when they come back."""
        evicted: list[Sequence] = []
        for sequence in list(self.sequences):
            end = sequence.num_computed_tokens + counts[sequence.seq_id]
            while sequence.status is SequenceStatus.RUNNING and not self._kv.allocate(sequence.seq_id, end):
                latest = max(self.sequences, key=lambda s: (s.arrival_time, s.seq_id))
                self.preempt(latest)
                evicted.append(latest)
        return evicted

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out to wait again without blocks."""
        self.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and its blocks back."""
        self.sequences.remove(sequence)
        self._kv.free(sequence.seq_id)
        self._released.append(sequence.seq_id)

    def pin_prompt(self, request_id: str) -> None:
        """Pin the prompt of this request as soon as it is computed."""
        self._to_pin.add(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._to_pin.discard(request_id)

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """K/V of the first ``num_tokens`` tokens is written: full blocks among them become shareable."""
        size = self._kv.block_size
        crossed = num_tokens // size > sequence.num_computed_tokens // size
        sequence.num_computed_tokens = num_tokens
        if crossed:
            self._kv.commit(sequence.seq_id, sequence.token_ids(), num_tokens)
        request = sequence.request
        if request.request_id in self._to_pin and num_tokens >= len(request.prompt_token_ids):
            self._to_pin.discard(request.request_id)
            self._kv.pin(request.prompt_token_ids, request.cache_salt)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is here in a wrong state."""
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence!r} holds blocks"
            assert self._kv.block_ids(sequence.seq_id), f"{sequence!r} runs without blocks"

    def __repr__(self) -> str:
        return f"<Residents {len(self.sequences)}>"
