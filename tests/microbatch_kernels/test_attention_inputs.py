"""The ints of a packed batch as tensors: one upload, the same figures on the host and on the device."""

from __future__ import annotations

import pytest
import torch

from microbatch_kernels.attention_inputs import AttentionInputs

CPU = torch.device("cpu")
#: (block_ids, start, count): a decode, a chunk, a whole prompt, another decode.
ROWS = [((3, 4, 5), 9, 1), ((7, 1), 3, 4), ((2,), 0, 2), ((6,), 0, 1)]


def test_tensors_say_what_the_ints_say() -> None:
    inputs = AttentionInputs.build(ROWS, 4, CPU)
    assert inputs.query_lens == (1, 4, 2, 1) and inputs.context_lens == (10, 7, 2, 1)
    assert inputs.lens.tolist() == [10, 7, 2, 1] and inputs.query_starts.tolist() == [0, 1, 5, 7, 8]
    assert inputs.decode_rows.tolist() == [0, 3]
    assert inputs.block_tables.tolist() == [[3, 4, 5], [7, 1, 0], [2, 0, 0], [6, 0, 0]]
    assert inputs.slot_mapping.tolist() == [21, 31, 4, 5, 6, 8, 9, 24]
    assert not inputs.is_decode and AttentionInputs.build([ROWS[0], ROWS[3]], 4, CPU).is_decode
    tensors = (inputs.block_tables, inputs.slot_mapping, inputs.lens, inputs.query_starts, inputs.decode_rows)
    assert {t.dtype for t in tensors} == {torch.int64}
    assert len({t.untyped_storage().data_ptr() for t in tensors[1:]}) == 1


def test_an_empty_row_has_no_last_token() -> None:
    with pytest.raises(ValueError, match="at least one new token"):
        AttentionInputs.build([((1,), 1, 0)], 4, CPU)


def test_tiles_cover_every_new_token_once_and_the_longest_context_comes_first() -> None:
    inputs = AttentionInputs.build(ROWS, 4, CPU)
    assert inputs.tiles(3).tolist() == [[1, 3], [1, 0], [2, 0]]
    assert inputs.tiles(3) is inputs.tiles(3) and inputs.tiles(1).shape == (6, 2)
    assert AttentionInputs.build(ROWS[:1], 4, CPU).tiles(3).shape == (0, 2)


def test_a_batch_of_nobody_and_a_move() -> None:
    nobody = AttentionInputs.build([], 4, CPU)
    assert nobody.block_tables.shape == (0, 0) and nobody.query_starts.tolist() == [0]
    inputs = AttentionInputs.build(ROWS, 4, CPU)
    assert inputs.to(CPU) is inputs
    inputs.tiles(3)
    moved = inputs.to(torch.device("meta"))
    assert {moved.lens.device.type, moved.block_tables.device.type} == {"meta"} and moved.tile_lists == {}
    assert moved.query_lens == inputs.query_lens and inputs.tile_lists
