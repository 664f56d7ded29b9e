"""The sequences that hold K/V blocks: who comes in, who must go when blocks run out, what is computed."""

from __future__ import annotations

from microbatch.core.budget import share_tokens
from microbatch.core.counters import SchedulerCounters
from microbatch.core.forks import num_shared_tokens
from microbatch.core.ports import KVManager
from microbatch.core.sequence import Sequence, SequenceStatus


class Residents:
    """``sequences`` in the order they came in. Every one of them has a block table, and no other sequence has one.

    Those that had to go while the newest plan was made are in ``evicted``.
    """

    def __init__(self, kv: KVManager, counters: SchedulerCounters) -> None:
        self.sequences: list[Sequence] = []
        self.evicted: list[Sequence] = []
        self.block_size = kv.block_size
        self._kv = kv
        self._counters = counters
        self._released: list[int] = []
        #: Requests whose prompts are to be pinned once they are computed.
        self.to_pin: set[str] = set()

    @property
    def has_released(self) -> bool:
        """Whether sequences have left that the executor does not know of yet."""
        return bool(self._released)

    def take_released(self) -> tuple[int, ...]:
        """The ids of those that have left since the last call."""
        released, self._released = tuple(self._released), []
        return released

    @property
    def fragmentation(self) -> float:
        """Share of the slots in the blocks that are in use which hold no token's K/V, 0 to 1."""
        used = (self._kv.num_blocks - self._kv.num_free_blocks) * self.block_size
        empty = sum(s.num_slots - s.num_computed_tokens for s in self.sequences)
        return min(1.0, empty / used) if used else 0.0  # choices that share a block count it each

    # ---- in

    def begin(self, sequence: Sequence, donor: Sequence | None, now: float) -> bool:
        """Give a sequence blocks for all of its tokens. False, and nothing changes, when there are not enough.

        The K/V of what it shares with ``donor`` is taken over, or what is cached is shared, whichever is longer; what
        was swapped out comes back.
        """
        computed = self._fork(sequence, donor) if donor is not None else None
        if computed is None:
            computed = self._begin(sequence)
        if computed is None:
            return False
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = computed
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            sequence.num_cached_tokens = computed
        self._note_table(sequence)
        self.sequences.append(sequence)
        return True

    def _begin(self, sequence: Sequence) -> int | None:
        """Share what is cached and swap in the rest, if it was swapped out; the number of tokens that are computed."""
        kv, seq_id, tokens = self._kv, sequence.seq_id, sequence.token_ids
        known = () if sequence.scores_prompt else tokens  # logits of cached tokens are gone
        cached = kv.begin(seq_id, known, len(tokens), sequence.request.cache_salt)
        if cached is None:
            return None
        sequence.next_full = cached + self.block_size
        if not sequence.num_swapped_tokens:
            self._counters.prefix_query_tokens += len(known)
            self._counters.prefix_hit_tokens += cached
            self._counters.pinned_hit_tokens += min(cached, kv.num_pinned_tokens(tokens, sequence.request.cache_salt))
            return cached
        swapped = kv.swap_in(seq_id)
        sequence.num_swapped_tokens = 0
        self._counters.swapped_in_blocks += max(0, kv.blocks_needed(swapped) - cached // self.block_size)
        return max(cached, swapped)

    def _fork(self, sequence: Sequence, donor: Sequence) -> int | None:
        """Take over what is shared with ``donor``. None when more is cached, or blocks are short."""
        kv, seq_id, tokens = self._kv, sequence.seq_id, sequence.token_ids
        shared = num_shared_tokens(donor, sequence)
        if shared <= kv.match_prefix(tokens, sequence.request.cache_salt):
            return None
        kv.fork(donor.seq_id, seq_id, shared)
        if not kv.allocate(seq_id, len(tokens)):
            kv.free(seq_id)
            return None
        sequence.next_full = shared // self.block_size * self.block_size + self.block_size
        self._counters.forked_tokens += shared
        return shared

    def _note_table(self, sequence: Sequence) -> None:
        sequence.block_ids = self._kv.block_ids(sequence.seq_id)
        sequence.num_slots = len(sequence.block_ids) * self.block_size

    # ---- the step

    def grow(self, budget: int | None) -> list[Sequence]:
        """Decide what each sequence is fed, all that is not computed or its share of the token budget, and make room
        for it. When blocks run out the latest arrivals are taken out; they are returned, waiting again."""
        self.evicted = []
        total = 0
        short = []
        for sequence in self.sequences:
            end = len(sequence.token_ids)
            sequence.num_scheduled_tokens = count = end - sequence.num_computed_tokens
            total += count
            if end > sequence.num_slots:
                short.append(sequence)
        if budget is not None and total > budget:
            self._share(budget)
        for sequence in short:
            self._grow(sequence, sequence.num_computed_tokens + sequence.num_scheduled_tokens)
        return self.evicted

    def _share(self, budget: int) -> None:
        counts = share_tokens([s.num_scheduled_tokens for s in self.sequences], budget)
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.num_scheduled_tokens = count

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while sequence.status is SequenceStatus.RUNNING and num_tokens > sequence.num_slots:
            if self._kv.allocate(sequence.seq_id, num_tokens):
                self._note_table(sequence)
                return
            latest = max(self.sequences, key=lambda s: (s.arrival_time, s.seq_id))
            self.preempt(latest, swap=True)
            self.evicted.append(latest)

    def share_full_blocks(self, sequence: Sequence) -> None:
        """K/V of the computed tokens is written: full blocks among them become shareable."""
        num_tokens = sequence.num_computed_tokens
        if num_tokens >= sequence.next_full:
            self._kv.commit(sequence.seq_id, sequence.token_ids, num_tokens)
            sequence.next_full = num_tokens // self.block_size * self.block_size + self.block_size
        if self.to_pin:
            self._pin(sequence)

    def _pin(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.request_id in self.to_pin and sequence.prompt_computed:
            self.to_pin.discard(request.request_id)
            self._kv.pin(request.prompt_token_ids, request.cache_salt)

    def pin_prompt(self, request_id: str) -> None:
        """Pin the prompt of this request as soon as it is computed."""
        self.to_pin.add(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.to_pin.discard(request_id)

    # ---- out

    def preempt(self, sequence: Sequence, *, swap: bool) -> None:
        """Take a sequence out to wait again without blocks. What was computed of it is kept in host memory, if
        ``swap`` and there is room, or else computed again."""
        computed = sequence.num_computed_tokens
        if swap and computed and self._kv.swap_out(sequence.seq_id, computed):
            sequence.num_swapped_tokens = computed
            self._counters.swapped_out_blocks += self._kv.blocks_needed(computed)
        self.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1

    def drop_swapped(self, sequence: Sequence) -> None:
        """A waiting sequence will not come back, or not with what was swapped out of it."""
        if sequence.num_swapped_tokens:
            sequence.num_swapped_tokens = 0
            self._kv.drop_swapped(sequence.seq_id)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and its blocks back."""
        self.sequences.remove(sequence)
        self._kv.free(sequence.seq_id)
        self._released.append(sequence.seq_id)
        sequence.block_ids = ()
        sequence.num_slots = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is here in a wrong state."""
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence!r} holds blocks"
            assert sequence.block_ids, f"{sequence!r} runs without blocks"
            assert sequence.block_ids == self._kv.block_ids(sequence.seq_id), f"{sequence!r} has an old block table"
            assert not sequence.num_swapped_tokens, f"{sequence!r} runs and is swapped out"

    def __repr__(self) -> str:
        return f"<Residents {len(self.sequences)}>"
