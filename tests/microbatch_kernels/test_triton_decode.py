"""Split decode attention against the naive one, through the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.triton_decode import decode_attention
from microbatch_kernels.triton_launch import MOST_SPLITS, choose_num_splits, choose_tiles
from tests.microbatch_kernels.triton_cases import DEVICES, Case, make_batch

HALF, BRAIN = torch.float16, torch.bfloat16
#: One token, whole blocks, one more and one less; far longer than a tile.
LENS = (1, 16, 33, 150)
CASES = {
    "plain": (Case((1,) * 4, LENS), None),
    "one split": (Case((1,) * 4, LENS), 1),
    "two splits": (Case((1,) * 4, LENS), 2),
    "more splits than tiles": (Case((1, 1), (1, 150)), 64),
    "window under a block": (Case((1, 1, 1), (3, 16, 150), window=5), 2),
    "window over tiles": (Case((1, 1), (90, 150), window=70, block_size=32), 3),
    "window of one": (Case((1, 1), (1, 40), window=1), 1),
    "softcap": (Case((1, 1), (17, 80), softcap=2.0), 2),
    "sinks": (Case((1, 1), (1, 130), sinks=True), 4),
    "sinks, one split": (Case((1, 1), (1, 130), sinks=True), 1),
    "all": (Case((1, 1), (20, 90), softcap=3.0, sinks=True, window=33, block_size=32), 2),
    "one head a group": (Case((1,), (70,), heads=2, kv_heads=2), 2),
    "groups of 3": (Case((1,), (70,), heads=9, kv_heads=3), 1),
    "groups of 17": (Case((1,), (70,), heads=17, kv_heads=1), 2),
    "size 80": (Case((1,), (70,), key_dim=80, value_dim=80), 2),
    "size 96": (Case((1,), (70,), key_dim=96, value_dim=96, dtype=HALF), 2),
    "size 256": (Case((1,), (70,), key_dim=256, value_dim=256, dtype=BRAIN), 2),
    "size 512": (Case((1,), (40,), key_dim=512, value_dim=512, dtype=HALF), 1),
    "size 8": (Case((1,), (9,), key_dim=8, value_dim=8, block_size=4), 1),
    "unequal sizes": (Case((1, 1), (20, 70), key_dim=96, value_dim=64), 2),
    "float16": (Case((1,) * 4, LENS, dtype=HALF), 2),
    "bfloat16": (Case((1,) * 4, LENS, dtype=BRAIN, sinks=True), 2),
    "int8": (Case((1, 1), (20, 150), kept_as=torch.int8), 2),
    "int8, float16": (Case((1, 1), (20, 150), kept_as=torch.int8, dtype=HALF, softcap=5.0), 1),
    "fp8": (Case((1, 1), (20, 150), kept_as=torch.float8_e4m3fn), 2),
    "fp8, bfloat16": (Case((1, 1), (20, 150), kept_as=torch.float8_e4m3fn, dtype=BRAIN), 1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_decode_equals_naive(name: str, device: str) -> None:
    case, num_splits = CASES[name]
    batch = make_batch(case, device)
    out = batch.empty()
    decode_attention(
        out, batch.query, batch.kv, batch.inputs, batch.options, scales=batch.scales, num_splits=num_splits
    )
    batch.check(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_of_padding_see_nothing_and_give_zero(device: str, num_splits: int) -> None:
    """A context of 0 reads not even the null block, which holds NaN here; a sink changes nothing about it."""
    batch = make_batch(Case((1, 1, 1), (20, 5, 9), sinks=True), device)
    batch.inputs.lens[1] = 0
    batch.inputs.block_tables[1] = 0
    for options in (batch.options, AttentionOptions(0.2), AttentionOptions(0.2, sliding_window=4)):
        out = batch.empty()
        decode_attention(out, batch.query, batch.kv, batch.inputs, options, num_splits=num_splits)
        assert out[1].eq(0).all() and out[[0, 2]].isfinite().all() and out[[0, 2]].count_nonzero() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_tables_may_lie_in_any_way_and_be_wider_than_the_contexts(device: str) -> None:
    """The buffers of CUDA graphs hold block tables upright, with leftovers behind the end of a context."""
    batch = make_batch(Case((1, 1), (20, 70)), device)
    tables = batch.inputs.block_tables
    wide = torch.full((9, 2), 999_999_999, device=tables.device)
    for row, used in enumerate((2, 5)):
        wide[:used, row] = tables[row, :used]
    batch.inputs.block_tables = wide.T
    out = batch.empty()
    decode_attention(out, batch.query, batch.kv, batch.inputs, batch.options, num_splits=2)
    batch.check(out)


@pytest.mark.parametrize("device", DEVICES)
def test_only_rows_with_one_new_token_are_its_own(device: str) -> None:
    batch = make_batch(Case((3, 1, 2, 1), (20, 33, 9, 1)), device)
    out = batch.empty()
    decode_attention(out, batch.query, batch.kv, batch.inputs, batch.options)
    assert out[[3, 6]].isfinite().all() and out[[0, 1, 2, 4, 5]].isnan().all()
    torch.testing.assert_close(out[[3, 6]], batch.expected[[3, 6]])


def test_limits_are_said() -> None:
    batch = make_batch(Case((1,), (5,)), "cpu")
    out, options = batch.empty(), batch.options

    def refused(message: str, query: torch.Tensor = batch.query, case: Case | None = None, **more: int) -> None:
        kv = batch.kv if case is None else make_batch(case, "cpu").kv
        with pytest.raises(ValueError, match=message):
            decode_attention(out, query, kv, batch.inputs, options, **more)  # type: ignore[arg-type]

    refused("not torch.float64", batch.query.double())
    refused("do not fit", batch.query[:, :5])
    refused("do not fit", batch.query[..., :32])
    refused("up to 512, not 576", case=Case((1,), (5,), key_dim=576, value_dim=64))
    refused("need scales", case=Case((1,), (5,), kept_as=torch.int8))
    refused("1 to 64 splits, not 65", num_splits=65)
    with pytest.raises(ValueError, match="take no scales"):
        scales = make_batch(Case((1,), (5,), kept_as=torch.int8), "cpu").scales
        decode_attention(out, batch.query, batch.kv, batch.inputs, options, scales=scales)
    nobody = AttentionInputs.build([], 16, torch.device("cpu"))
    decode_attention(batch.query[:0], batch.query[:0], batch.kv, nobody, options)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert choose_num_splits(num_programs=8, max_context=32768, block_n=64, num_processors=132) == 32
    assert choose_num_splits(num_programs=8, max_context=200, block_n=64, num_processors=132) == 4
    assert choose_num_splits(num_programs=512, max_context=32768, block_n=64, num_processors=132) == 1
    assert choose_num_splits(num_programs=1, max_context=131072, block_n=64, num_processors=132) == MOST_SPLITS
    assert choose_num_splits(num_programs=1, max_context=0, block_n=64, num_processors=132) == 1


def test_tiles_are_powers_of_two_whatever_the_shape() -> None:
    for key_dim, value_dim in ((64, 64), (80, 80), (96, 64), (192, 128), (256, 256)):
        for heads, kv_heads in ((9, 3), (17, 1), (71, 1)):
            for dtype in (torch.float32, HALF):
                case = Case((1,), (5,), heads, kv_heads, key_dim, value_dim, dtype)
                batch = make_batch(case, "cpu")
                for num_tokens in (1, 3, 500):
                    tiles = choose_tiles(batch.query, batch.kv, num_tokens)
                    for side in tiles[:2]:
                        assert side >= 16 and side.bit_count() == 1
                    assert tiles.block_m >= heads // kv_heads
