"""The manager against a toy model, under any order of calls.

The model is a few dictionaries: which sequence has which tokens, and which blocks hold which content. It predicts every
refusal and every hit; a toy store shows any K/V that is not what the sequence would have computed itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from microbatch_kernels import prefix
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.tables import PinnedPrefix
from tests.microbatch_kernels.toy import Context, ToyStore

TOKENS = st.integers(0, 1)
SETTINGS = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass
class ToySequence:
    """Tokens, how many of them are computed, and whether the next step writes the rest."""

    tokens: list[int]
    salt: str
    table: tuple[int, ...]
    computed: int
    ready: bool = True


class ManagerMachine(RuleBasedStateMachine):
    """Rules are the calls of a scheduler; ``step`` is the device: copies first, then all writes, then commits."""

    @initialize(
        num_blocks=st.sampled_from([10, 16, 24, 3]), block_size=st.sampled_from([2, 3, 1]), prefix_cache=st.booleans()
    )
    def start(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.kv = PagedKVManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.store = ToyStore(block_size)
        self.prefix_cache = prefix_cache
        self.sequences: dict[int, ToySequence] = {}
        self.pins: dict[int, tuple[PinnedPrefix, list[Context]]] = {}
        self.contents: dict[int, Context] = {}
        self.next_id = 0

    # ---- the model

    def refs(self, block_id: int) -> int:
        tables = [s.table for s in self.sequences.values()] + [p.block_ids for p, _ in self.pins.values()]
        return sum(table.count(block_id) for table in tables)

    def num_free(self) -> int:
        return sum(self.refs(b) == 0 for b in range(1, self.kv.num_blocks + 1))

    def holders(self, content: Context) -> list[int]:
        return [b for b, c in self.contents.items() if c == content]

    def prefixes(self, tokens: list[int], salt: str, stop: int) -> list[Context]:
        """Contents of the full blocks within the first ``stop`` tokens."""
        size = self.kv.block_size
        return [(salt, tuple(tokens[:end])) for end in range(size, stop + 1, size)]

    def hits(self, tokens: list[int], salt: str) -> list[Context]:
        pinned = {content for _, contents in self.pins.values() for content in contents}
        found = []
        for content in self.prefixes(tokens, salt, len(tokens) - 1):
            if not self.holders(content) or not (self.prefix_cache or content in pinned):
                break
            found.append(content)
        return found

    def taken(self, block_ids: tuple[int, ...], free_before: list[int]) -> None:
        """Blocks were handed out: worthless ones first, and no content before those that stand on it."""
        worthless = [b for b in free_before if b not in self.contents]
        lost = [self.contents.pop(b) for b in block_ids if b in self.contents]
        assert not lost or set(worthless) <= set(block_ids)
        for salt, tokens in lost:
            assert not any(s == salt and t[: len(tokens)] == tokens for s, t in self.contents.values())

    def released(self, table: tuple[int, ...]) -> None:
        for block_id in reversed(table):
            if self.refs(block_id) == 0 and block_id in self.contents:
                if not self.prefix_cache or len(self.holders(self.contents[block_id])) > 1:
                    del self.contents[block_id]

    def free_blocks(self) -> list[int]:
        return [b for b in range(1, self.kv.num_blocks + 1) if self.refs(b) == 0]

    def pick(self, data: st.DataObject, ready: bool | None = None) -> int:
        return data.draw(st.sampled_from([i for i, s in self.sequences.items() if ready in (None, s.ready)]))

    # ---- the calls

    @rule(data=st.data(), extra=st.integers(0, 3), salt=st.sampled_from(["", "", "", "salt"]), then_step=st.booleans())
    def begin(self, data: st.DataObject, extra: int, salt: str, then_step: bool) -> None:
        known = sorted({t for _, t in self.contents.values()} | {tuple(s.tokens) for s in self.sequences.values()})
        base = list(data.draw(st.sampled_from([*known, ()])))
        tokens = base + data.draw(st.lists(TOKENS, min_size=0 if base else 1, max_size=6))
        hits, free = self.hits(tokens, salt), self.free_blocks()
        num_fresh = max(0, self.kv.blocks_needed(len(tokens) + extra) - len(hits))
        revived = [b for content in hits for b in self.holders(content)[:1] if self.refs(b) == 0]
        assert self.kv.match_prefix(tokens, salt) == len(hits) * self.kv.block_size
        cached = self.kv.begin(self.next_id, tokens, len(tokens) + extra, salt)
        if num_fresh + len(revived) > len(free):
            assert cached is None
            if self.sequences:
                self.free(data)
            return
        assert cached == len(hits) * self.kv.block_size < len(tokens)
        table = self.kv.block_ids(self.next_id)
        assert [self.contents[b] for b in table[: len(hits)]] == hits
        assert len(table) == len(hits) + num_fresh
        self.taken(table[len(hits) :], [b for b in free if b not in revived])
        self.sequences[self.next_id] = ToySequence(tokens, salt, table, cached)
        self.next_id += 1
        if then_step:
            self.step()

    @precondition(lambda self: any(not s.ready for s in self.sequences.values()))
    @rule(data=st.data(), then_step=st.booleans())
    def allocate(self, data: st.DataObject, then_step: bool) -> None:
        """Some or all of the sequences that wait for their next token, in any order."""
        waiting = data.draw(st.permutations([i for i, s in self.sequences.items() if not s.ready]))
        for seq_id in waiting[: data.draw(st.integers(1, len(waiting)))]:
            self.allocate_one(seq_id, data.draw(st.lists(TOKENS, min_size=1, max_size=3)))
        if then_step:
            self.step()

    def allocate_one(self, seq_id: int, new: list[int]) -> None:
        sequence, free = self.sequences[seq_id], self.free_blocks()
        num_tokens = len(sequence.tokens) + len(new)
        first, end = sequence.computed // self.kv.block_size, self.kv.blocks_needed(num_tokens)
        shared = [b for b in sequence.table[first:end] if self.refs(b) > 1]
        possible = max(0, end - len(sequence.table)) + len(shared) <= len(free)
        assert self.kv.allocate(seq_id, num_tokens) == possible
        table = self.kv.block_ids(seq_id)
        if not possible:
            assert table == sequence.table
            return
        assert table[:first] == sequence.table[:first]
        assert len(table) == max(end, len(sequence.table))
        self.taken(tuple(b for b in table if b not in sequence.table), free)
        sequence.tokens, sequence.table, sequence.ready = sequence.tokens + new, table, True
        assert all(self.refs(b) == 1 and b not in self.contents for b in table[first:end])

    @rule()
    def step(self) -> None:
        self.store.copy(self.kv.take_copies())
        ready = {i: s for i, s in self.sequences.items() if s.ready}
        for s in ready.values():
            self.store.write(s.table, s.tokens, s.computed, len(s.tokens), s.salt)
        for seq_id, s in ready.items():
            self.store.read(s.table, s.tokens, len(s.tokens), s.salt)
            s.computed, s.ready = len(s.tokens), False
            self.kv.commit(seq_id, s.tokens, s.computed)
            for block_id, content in zip(s.table, self.prefixes(s.tokens, s.salt, s.computed)):
                assert self.contents.setdefault(block_id, content) == content
                for spare in [b for b in self.holders(content) if self.refs(b) == 0]:
                    del self.contents[spare]

    @precondition(lambda self: any(not s.ready for s in self.sequences.values()))
    @rule(data=st.data(), children=st.integers(1, 3))
    def fork(self, data: st.DataObject, children: int) -> None:
        parent = self.pick(data, ready=False)
        s = self.sequences[parent]
        for _ in range(children):
            self.kv.fork(parent, self.next_id)
            self.sequences[self.next_id] = ToySequence(list(s.tokens), s.salt, s.table, s.computed, ready=False)
            self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        self.kv.free(seq_id)
        self.released(self.sequences.pop(seq_id).table)
        with pytest.raises(KeyError):
            self.kv.free(seq_id)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        s = self.sequences[self.pick(data)]
        length = data.draw(st.integers(0, len(s.tokens)))
        contents = self.prefixes(s.tokens, s.salt, length)
        if not all(self.holders(content) for content in contents):
            with pytest.raises(LookupError):
                self.kv.pin(s.tokens[:length], s.salt)
            return
        pin = self.kv.pin(s.tokens[:length], s.salt)
        assert [self.contents[b] for b in pin.block_ids] == contents
        self.pins[pin.prefix_id] = (pin, contents)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.sampled_from(sorted(self.pins))))
        self.kv.unpin(pin)
        self.released(pin.block_ids)

    # ---- what always holds

    @invariant()
    def books_balance(self) -> None:
        self.kv.check_integrity()
        facts = self.kv.statistics()
        assert facts.num_free_blocks == self.kv.num_free_blocks == self.num_free()
        assert facts.num_cached_blocks == len(self.contents)
        assert facts.num_sequences == len(self.sequences)
        for seq_id, s in self.sequences.items():
            assert self.kv.block_ids(seq_id) == s.table
            assert 0 not in s.table

    @invariant()
    def every_known_content_is_in_its_block(self) -> None:
        for block_id, (salt, tokens) in self.contents.items():
            for offset in range(self.kv.block_size):
                end = len(tokens) - self.kv.block_size + offset + 1
                assert self.store.slots[block_id * self.kv.block_size + offset] == (salt, tokens[:end])

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for seq_id in list(self.sequences):
            self.kv.free(seq_id)
        for pin, _ in self.pins.values():
            self.kv.unpin(pin)
        self.kv.check_integrity()
        assert self.kv.num_free_blocks == self.kv.num_blocks
        everything = self.kv.num_blocks * self.kv.block_size
        assert self.kv.begin(-1, [5] * everything, everything) == 0


def test_manager_agrees_with_the_toy_model() -> None:
    run_state_machine_as_test(ManagerMachine, settings=SETTINGS)


@pytest.mark.parametrize("hash_values", [1, 2])
def test_b62_manager_agrees_with_the_toy_model_when_hashes_collide(
    monkeypatch: pytest.MonkeyPatch, hash_values: int
) -> None:
    monkeypatch.setattr(prefix, "block_hash", lambda parent, token_ids, salt: sum(token_ids) % hash_values)
    run_state_machine_as_test(ManagerMachine, settings=settings(SETTINGS, max_examples=40))
