"""What the Triton attention kernels share: a tile of queries meets tiles of paged keys and values, softmax as it goes.

Scores are kept times log2(e), because a GPU has an instruction for powers of 2. Every function is inlined.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def token_slots(table, stride, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Slot int64 of each position of ``tokens`` ``[N]`` in one sequence, whose block ids lie ``stride`` apart from
    ``table`` on; of the null block behind ``end``."""
    blocks = tl.load(table + (tokens // BLOCK_SIZE) * stride, mask=tokens < end, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE


@triton.jit
def load_states(pool, slots, head, valid, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """One head's keys or values of N tokens, ``[N, DIM_PAD]``: zeros where not ``valid`` and behind ``DIM``."""
    dims = tl.arange(0, DIM_PAD)
    where = pool + (slots[:, None] * KV_HEADS + head) * DIM + dims[None, :]
    return tl.load(where, mask=valid[:, None] & (dims[None, :] < DIM), other=0)


@triton.jit
def as_numbers(states, DOT: tl.constexpr):
    """``states`` in the type that products are made in, exactly.

    ``uint8`` is the bits of ``float8_e4m3fn``, which GPUs before compute capability 8.9 do not know: shifted into a
    float16, whose exponent counts from 15 where theirs counts from 7, they are the number divided by 256.
    """
    if states.dtype == tl.uint8:
        bits = states.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DOT)
    else:
        return states.to(DOT)


@triton.jit
def tanh(x):
    """By a power of 2 that is at most 1, so it never overflows."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def attend(
    acc,
    peak,
    total,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    valid,
    seen,
    head,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOT: tl.constexpr,
):
    """``query`` ``[M, KEY_PAD]`` against the N tokens of ``slots``: the new ``acc``, ``peak`` and ``total``.

    Over the tokens so far ``peak`` ``[M]`` is the highest score, ``total`` ``[M]`` the sum of the weights relative to
    it, ``acc`` ``[M, VALUE_PAD]`` that of the weighted values. ``valid`` ``[N]``: the token exists; ``seen``
    ``[M, N]``: this query attends to it. ``scale`` holds log2(e), or one over ``softcap``, which then holds log2(e).
    """
    found = as_numbers(load_states(keys, slots, head, valid, KV_HEADS, KEY_DIM, KEY_PAD), DOT)
    scores = tl.dot(query, tl.trans(found), input_precision="ieee") * scale
    if HAS_SCALES:
        scores *= tl.load(key_scales + slots * KV_HEADS + head, mask=valid, other=0.0)[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores) * softcap
    scores = tl.where(seen, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: -inf - -inf is not a number
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    if HAS_SCALES:
        weights *= tl.load(value_scales + slots * KV_HEADS + head, mask=valid, other=0.0)[None, :]
    found = as_numbers(load_states(values, slots, head, valid, KV_HEADS, VALUE_DIM, VALUE_PAD), DOT)
    acc = acc * fade[:, None] + tl.dot(weights.to(DOT), found, input_precision="ieee")
    return acc, new_peak, total
