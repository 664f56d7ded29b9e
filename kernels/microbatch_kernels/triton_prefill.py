"""Paged attention of many new tokens: chunks of prompts, each over the whole context of its own sequence, causally.

A tile holds successive new tokens of one sequence, each with all the query heads of one K/V head, so a group of any
size fills it and K/V is read once for the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_launch import Scales, Tiles, check, choose_tiles, common_arguments
from microbatch_kernels.triton_tiles import LOG2E, attend, token_slots


@triton.jit(do_not_specialize=["table_row_stride", "table_column_stride"])
def _prefill(
    out,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tiles,
    query_starts,
    context_lens,
    block_tables,
    query_token_stride,
    query_head_stride,
    table_row_stride,
    table_column_stride,
    window,
    scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program: the queries of one tile for one K/V head. A tile is a row and its first new token in there."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    pair = tl.program_id(0) * 2
    kv_head = tl.program_id(1)
    row = tl.load(tiles + pair).to(tl.int64)
    first_new = tl.load(tiles + pair + 1).to(tl.int32)
    first_token = tl.load(query_starts + row)
    num_new = (tl.load(query_starts + row + 1) - first_token).to(tl.int32)
    context = tl.load(context_lens + row).to(tl.int32)

    member = tl.arange(0, BLOCK_M)
    new = first_new + member // GROUP
    head = kv_head * GROUP + member % GROUP
    real = (member < BLOCK_Q * GROUP) & (new < num_new)
    token = first_token.to(tl.int64) + new
    key_dims = tl.arange(0, KEY_PAD)
    found = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + key_dims[None, :],
        mask=real[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    ).to(DOT)

    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    if HAS_SINKS:  # a weight of its own without a value
        peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    position = context - num_new + new
    earliest = context - num_new + first_new
    begin = tl.maximum(earliest - window + 1, 0) if HAS_WINDOW else earliest * 0
    end = tl.minimum(earliest + BLOCK_Q, context)
    table = block_tables + row * table_row_stride
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        valid = tokens < end
        seen = valid[None, :] & (tokens[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        slots = token_slots(table, table_column_stride, tokens, end, BLOCK_SIZE)
        acc, peak, total = attend(
            acc, peak, total, found, keys, values, key_scales, value_scales, slots, valid, seen,
            kv_head, scale, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, HAS_SOFTCAP, HAS_SCALES, DOT,
        )  # fmt: skip

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    value_dims = tl.arange(0, VALUE_PAD)
    where = out + (token[:, None] * HEADS + head[:, None]) * VALUE_DIM + value_dims[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=real[:, None] & (value_dims[None, :] < VALUE_DIM))


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    scales: Scales | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Attention of the rows with several new tokens, into their places in ``out`` ``[T, H, value_dim]``.

    ``query`` ``[T, H, key_dim]``; ``scales`` of K/V kept in 8 bits; ``tiles`` by the shapes unless given.
    """
    check(query, kv, scales)
    longest = max(inputs.query_lens, default=0)
    if longest < 2:
        return
    tiles = tiles or choose_tiles(query, kv, longest)
    work = inputs.tiles(tiles.block_m // (query.shape[1] // kv.num_kv_heads))
    arguments = common_arguments(query, kv, inputs, options, scales, tiles)
    _prefill[(len(work), kv.num_kv_heads)](out, tiles=work, **arguments)
