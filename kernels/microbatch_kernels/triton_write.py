"""Store rows by slot: K/V of the new tokens into their places in the pools, keys and values in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(
    key_pool,
    value_pool,
    keys,
    values,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``BLOCK`` numbers of one token, of its keys and of its values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.where(slot >= 0, HEADS, 0)  # none of a token of padding

    head, dim = place // KEY_DIM, place % KEY_DIM
    mask = place < heads * KEY_DIM
    state = tl.load(keys + token * key_token_stride + head * key_head_stride + dim, mask=mask)
    tl.store(key_pool + slot * (HEADS * KEY_DIM) + place, state, mask=mask)

    head, dim = place // VALUE_DIM, place % VALUE_DIM
    mask = place < heads * VALUE_DIM
    state = tl.load(values + token * value_token_stride + head * value_head_stride + dim, mask=mask)
    tl.store(value_pool + slot * (HEADS * VALUE_DIM) + place, state, mask=mask)


def write_slots(
    key_pool: torch.Tensor, value_pool: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """``keys``, ``values`` ``[T, heads, ·]`` into pools ``[num_blocks + 1, block_size, heads, ·]``, at ``slots``
    ``[T]``.

    A token whose slot is negative is not stored: padding of a batch. Types must be those of the pools, as bits are
    moved and nothing is converted.
    """
    num_tokens, heads, key_dim = keys.shape
    value_dim = values.shape[2]
    if (keys.dtype, values.dtype) != (key_pool.dtype, value_pool.dtype):
        raise ValueError(f"K/V of {keys.dtype} and {values.dtype} do not fit pools of {key_pool.dtype}")
    if (key_pool.shape[2:], value_pool.shape[2:]) != (keys.shape[1:], values.shape[1:]):
        shapes = [list(tensor.shape) for tensor in (keys, values, key_pool, value_pool)]
        raise ValueError("keys and values {}, {} do not fit pools {}, {}".format(*shapes))
    if num_tokens == 0:
        return
    keys, values = _with_dense_rows(keys), _with_dense_rows(values)
    size = heads * max(key_dim, value_dim)
    block = min(triton.next_power_of_2(size), 2048)
    _write[(num_tokens, triton.cdiv(size, block))](
        key_pool,
        value_pool,
        keys,
        values,
        slots,
        *keys.stride()[:2],
        *values.stride()[:2],
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=block,
    )


def _with_dense_rows(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()
