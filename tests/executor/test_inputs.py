"""The tensors of a packed step: laid end to end, and written over from step to step."""

from __future__ import annotations

import pytest
import torch

from microbatch.core.plan import SequenceStep
from microbatch.core.request import SamplingParams
from microbatch.executor.inputs import InputsBuilder, PackedInputs
from microbatch_kernels.attention_inputs import AttentionInputs

CPU = torch.device("cpu")
PARAMS = SamplingParams()


def step(seq_id: int, ids: tuple[int, ...], start: int, blocks: tuple[int, ...], samples: bool = True) -> SequenceStep:
    return SequenceStep(seq_id, ids, start, blocks, samples, PARAMS)


def check(inputs: PackedInputs, steps: list[SequenceStep]) -> None:
    """Against what a fresh build of each part gives."""
    rows = [(s.block_ids, s.start, len(s.token_ids)) for s in steps]
    fresh = AttentionInputs.build(rows, 4, CPU)
    assert inputs.token_ids.tolist() == [[t for s in steps for t in s.token_ids]]
    assert inputs.positions.tolist() == [[p for _, start, count in rows for p in range(start, start + count)]]
    assert inputs.seq_ids == [s.seq_id for s in steps if s.samples]
    for name in ("query_lens", "context_lens", "is_decode"):
        assert getattr(inputs.attention, name) == getattr(fresh, name), name
    for name in ("block_tables", "slot_mapping", "lens", "query_starts", "decode_rows"):
        assert getattr(inputs.attention, name).tolist() == getattr(fresh, name).tolist(), name


def test_chunks_and_decodes_are_laid_end_to_end() -> None:
    steps = [step(3, (7, 8, 9), 4, (1, 2), samples=False), step(5, (6,), 9, (3, 4, 5))]
    inputs = InputsBuilder(4, CPU).build(steps)
    check(inputs, steps)
    assert inputs.kept.tolist() == [3]


def test_a_step_that_samples_nothing_keeps_one_row_for_nobody() -> None:
    inputs = InputsBuilder(4, CPU).build([step(3, (7,), 4, (1, 2), samples=False)])
    assert inputs.kept.tolist() == [0] and inputs.seq_ids == []


def test_steps_after_each_other_are_each_what_a_fresh_one_is() -> None:
    """Decodes, a sequence more, one gone, a prompt between, tables that grow and that become shorter."""
    build = InputsBuilder(4, CPU).build
    first, longer = (1, 2), (1, 2, 7)
    batches = [
        [step(0, (5,), 6, first), step(1, (6,), 3, (4,))],
        [step(0, (7,), 7, first), step(1, (8,), 4, (4, 5))],
        [step(0, (7,), 8, longer), step(1, (8,), 5, (4, 5)), step(2, (1,), 0, (9,))],
        [step(0, (7,), 9, longer), step(2, (1,), 1, (9,)), step(3, (1, 2, 3), 0, (10, 11))],
        [step(2, (1,), 2, (9,)), step(3, (9,), 3, (10, 11))],
        [step(4, (1,), 40, tuple(range(20, 31))), step(3, (9,), 4, (10, 11))],
        [step(3, (9,), 5, (10, 11))],
    ]
    for steps in batches:
        check(build(steps), steps)


def test_what_backends_derive_from_a_step_is_forgotten_with_it() -> None:
    builder = InputsBuilder(4, CPU)
    attention = builder.build([step(0, (5,), 6, (1, 2))]).attention
    attention.tiles(3)
    attention.masks["x", 1, None] = torch.zeros(1)
    attention = builder.build([step(0, (5,), 7, (1, 2))]).attention
    assert not attention.tile_lists and not attention.masks


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(IndexError):
        InputsBuilder(4, CPU).build([step(0, (5,), 8, (1, 2))])
    with pytest.raises(ValueError, match="outside 2 blocks of 4"):
        InputsBuilder(4, CPU).build([step(0, (5, 6), 7, (1, 2))])
