"""Attention of chunks against the naive one, through the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from microbatch_kernels.triton_launch import Tiles
from microbatch_kernels.triton_prefill import prefill_attention
from tests.microbatch_kernels.triton_cases import DEVICES, Case, make_batch

HALF, BRAIN = torch.float16, torch.bfloat16
CASES = {
    "whole prompts": Case((5, 31, 2), (5, 31, 2)),
    "chunks": Case((3, 16, 7), (20, 16, 40)),
    "several tiles": Case((40, 2), (90, 64)),
    "window under a block": Case((5, 20), (16, 60), window=5),
    "window over tiles": Case((33,), (120,), window=70, block_size=32),
    "window of one": Case((18,), (18,), window=1),
    "softcap": Case((9,), (40,), softcap=2.0),
    "sinks": Case((9, 2), (40, 2), sinks=True),
    "all": Case((9, 20), (40, 25), softcap=3.0, sinks=True, window=7, block_size=32),
    "one head a group": Case((20,), (50,), heads=2, kv_heads=2),
    "groups of 3": Case((20,), (50,), heads=9, kv_heads=3),
    "groups of 17": Case((3,), (50,), heads=17, kv_heads=1),
    "groups of 71": Case((2,), (10,), heads=71, kv_heads=1, key_dim=16, value_dim=16),
    "size 80": Case((20,), (50,), key_dim=80, value_dim=80),
    "size 96": Case((20,), (50,), key_dim=96, value_dim=96, dtype=HALF),
    "size 256": Case((20,), (50,), key_dim=256, value_dim=256, dtype=BRAIN),
    "size 512": Case((9,), (30,), key_dim=512, value_dim=512, dtype=HALF),
    "size 8": Case((6,), (9,), key_dim=8, value_dim=8, block_size=4),
    "unequal sizes": Case((7,), (50,), key_dim=96, value_dim=64),
    "float16": Case((5, 31), (70, 31), dtype=HALF),
    "bfloat16": Case((5, 31), (70, 31), dtype=BRAIN, sinks=True),
    "int8": Case((5, 2), (20, 70), kept_as=torch.int8),
    "fp8": Case((5, 2), (20, 70), kept_as=torch.float8_e4m3fn, dtype=HALF),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_naive(name: str, device: str) -> None:
    batch = make_batch(CASES[name], device)
    out = batch.empty()
    prefill_attention(out, batch.query, batch.kv, batch.inputs, batch.options, scales=batch.scales)
    batch.check(out)


@pytest.mark.parametrize("device", DEVICES)
def test_small_tiles_give_the_same(device: str) -> None:
    batch = make_batch(Case((23, 9), (50, 9), window=20, sinks=True), device)
    out = batch.empty()
    tiles = Tiles(16, 16, num_warps=4)
    prefill_attention(out, batch.query, batch.kv, batch.inputs, batch.options, tiles=tiles)
    batch.check(out)
    assert batch.inputs.tiles(5).tolist() == [[0, 20], [0, 15], [0, 10], [0, 5], [0, 0], [1, 5], [1, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_only_rows_with_several_new_tokens_are_its_own(device: str) -> None:
    batch = make_batch(Case((3, 1, 2, 1), (20, 33, 9, 1)), device)
    out = batch.empty()
    prefill_attention(out, batch.query, batch.kv, batch.inputs, batch.options)
    mine = [0, 1, 2, 4, 5]
    assert out[[3, 6]].isnan().all()
    torch.testing.assert_close(out[mine], batch.expected[mine])
    decodes = make_batch(Case((1, 1), (3, 4)), device)
    out = decodes.empty()
    prefill_attention(out, decodes.query, decodes.kv, decodes.inputs, decodes.options)
    assert out.isnan().all()
