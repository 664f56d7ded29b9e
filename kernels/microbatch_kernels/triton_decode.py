"""Paged decode attention, one new token a row: each context is cut into splits, which a second kernel combines.

A row alone has only as many programs as it has K/V heads, which leaves most of a GPU idle; the splits fill it. All
sizes come from shapes, never from the lengths of a step, so that a CUDA graph of it stays true: a split behind the end
of its context has nothing to do.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_launch import (
    MOST_SPLITS,
    Scales,
    Tiles,
    check,
    choose_num_splits,
    choose_tiles,
    common_arguments,
    num_processors,
)
from microbatch_kernels.triton_tiles import LOG2E, attend, token_slots

_COMBINE_SHARED: Final = (
    *("rows", "query_starts", "context_lens", "num_splits", "window"),
    *("HEADS", "VALUE_DIM", "VALUE_PAD", "BLOCK_N", "HAS_WINDOW"),
)


@triton.jit
def first_and_share(context, window, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First position that the last token of ``context`` sees, and how many of them each split takes."""
    first = tl.maximum(context - window, 0) if HAS_WINDOW else context * 0
    tiles = tl.cdiv(tl.cdiv(context - first, num_splits), BLOCK_N)
    return first, tl.maximum(tiles, 1) * BLOCK_N


@triton.jit(do_not_specialize=["num_splits", "table_row_stride", "table_column_stride"])
def _decode(
    out,
    partial,
    logsum,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    rows,
    query_starts,
    context_lens,
    block_tables,
    num_splits,
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
    ONE_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program: one row, the heads that share one K/V head, one split of the context."""
    place = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + place).to(tl.int64)
    context = tl.load(context_lens + row).to(tl.int32)
    first, share = first_and_share(context, window, num_splits, HAS_WINDOW, BLOCK_N)
    begin = first + split * share
    if (begin >= context) & (split > 0):
        return
    end = tl.minimum(begin + share, context)

    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    key_dims = tl.arange(0, KEY_PAD)
    token = tl.load(query_starts + row).to(tl.int64)
    found = tl.load(
        query + token * query_token_stride + head[:, None] * query_head_stride + key_dims[None, :],
        mask=(member[:, None] < GROUP) & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    ).to(DOT)

    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # a weight of its own without a value, counted once: by the split that is always there
        if split == 0:
            peak = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
            total += 1.0

    table = block_tables + row * table_row_stride
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        valid = tokens < end
        slots = token_slots(table, table_column_stride, tokens, end, BLOCK_SIZE)
        acc, peak, total = attend(
            acc, peak, total, found, keys, values, key_scales, value_scales, slots, valid, valid[None, :],
            kv_head, scale, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, HAS_SOFTCAP, HAS_SCALES, DOT,
        )  # fmt: skip

    total_or_one = tl.where(total > 0.0, total, 1.0)  # a row of padding sees nothing: its result is 0
    acc = acc / total_or_one[:, None]
    value_dims = tl.arange(0, VALUE_PAD)
    mask = (member[:, None] < GROUP) & (value_dims[None, :] < VALUE_DIM)
    if ONE_SPLIT:
        where = out + (token * HEADS + head[:, None]) * VALUE_DIM + value_dims[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=mask)
    else:
        pair = (place * HEADS + head) * num_splits + split
        tl.store(partial + pair[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=mask)
        weight = tl.where(total > 0.0, peak + tl.log2(total_or_one), float("-inf"))
        tl.store(logsum + pair, weight, mask=member < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _combine(
    out,
    partial,
    logsum,
    rows,
    query_starts,
    context_lens,
    num_splits,
    window,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program: the splits of one head of one row, each weighted by the sum of its weights (log2 in ``logsum``)."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64)
    context = tl.load(context_lens + row).to(tl.int32)
    first, share = first_and_share(context, window, num_splits, HAS_WINDOW, BLOCK_N)
    used = tl.maximum(tl.cdiv(context - first, share), 1)

    split = tl.arange(0, MOST)
    pair = (place * HEADS + head) * num_splits + split
    weight = tl.load(logsum + pair, mask=split < used, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0.0, total, 1.0)

    dims = tl.arange(0, VALUE_PAD)
    mask = (split[:, None] < used) & (dims[None, :] < VALUE_DIM)
    found = tl.load(partial + pair[:, None] * VALUE_DIM + dims[None, :], mask=mask, other=0.0)
    token = tl.load(query_starts + row).to(tl.int64)
    where = out + (token * HEADS + head) * VALUE_DIM + dims
    tl.store(where, tl.sum(found * weight[:, None], 0).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    scales: Scales | None = None,
    num_splits: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Attention of the rows with one new token, into their places in ``out`` ``[T, H, value_dim]``.

    ``query`` ``[T, H, key_dim]``; ``scales`` of K/V kept in 8 bits. ``num_splits`` and ``tiles``: by the shapes unless
    given.
    """
    check(query, kv, scales)
    rows, heads = inputs.decode_rows, query.shape[1]
    if len(rows) == 0:
        return
    tiles = tiles or choose_tiles(query, kv, 1)
    if num_splits is None:
        max_context = inputs.block_tables.shape[1] * kv.block_size
        programs = len(rows) * kv.num_kv_heads
        num_splits = choose_num_splits(programs, max_context, tiles.block_n, num_processors(query.device))
    if not 1 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"a context can be cut into 1 to {MOST_SPLITS} splits, not {num_splits}")
    shape = (len(rows), heads, num_splits if num_splits > 1 else 0)
    partial = torch.empty(*shape, kv.values.shape[-1], dtype=torch.float32, device=query.device)
    logsum = torch.empty(shape, dtype=torch.float32, device=query.device)
    arguments = common_arguments(query, kv, inputs, options, scales, tiles)
    arguments.update(rows=rows, num_splits=num_splits)
    _decode[(len(rows), kv.num_kv_heads, num_splits)](out, partial, logsum, ONE_SPLIT=num_splits == 1, **arguments)
    if num_splits > 1:
        shared = {name: arguments[name] for name in _COMBINE_SHARED}
        _combine[(len(rows), heads)](out, partial, logsum, MOST=triton.next_power_of_2(num_splits), **shared)
