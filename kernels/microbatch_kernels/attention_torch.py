"""Paged attention with torch operators: gathers the context and calls scaled dot-product attention.

One gather and one call for all decodes of a batch (the heads of a group become its query positions, so shared K/V
heads are not expanded), one call for each prefill chunk. Softcap and sinks, which that function lacks, take the
written-out way.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.layer_kv import LayerKV


def attention_torch(
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of packed queries over their paged context; arguments as in ``attention_naive``."""
    if options.softcap is not None or options.sinks is not None:
        return attention_naive(query, kv, inputs, options)
    if inputs.is_decode:
        return _decode(query, kv, inputs, options)
    outputs, start = [], 0
    for row, new in enumerate(inputs.query_lens):
        outputs.append(_prefill(query[start : start + new], kv, inputs, row, options))
        start += new
    return torch.cat(outputs)


def _decode(
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
) -> torch.Tensor:
    """All rows at once: ``query`` ``[B, H, D]`` seen as ``[B, KVH, group, D]`` against ``[B, KVH, context, D]``."""
    rows, heads, dim = query.shape
    kv_heads = kv.num_kv_heads
    keys, values = (pool.transpose(1, 2) for pool in kv.gather(inputs.block_tables))
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    mask = _decode_mask(inputs, keys.shape[2], options.sliding_window)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scale)
    return out.reshape(rows, heads, -1)


def _decode_mask(inputs: AttentionInputs, width: int, window: int | None) -> torch.Tensor:
    """Bool ``[B, 1, 1, width]``: which slots of the gathered context each row sees."""
    device = inputs.block_tables.device
    key = (str(device), width, window)
    if key not in inputs.masks:
        columns = torch.arange(width, device=device)[None, :]
        lens = torch.tensor(inputs.context_lens, device=device)[:, None]
        visible = columns < lens
        if window is not None:
            visible &= columns >= lens - window
        inputs.masks[key] = visible[:, None, None, :]
    return inputs.masks[key]


def _prefill(
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    row: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """One sequence: its new tokens ``[N, H, D]`` against its whole context."""
    new, context = inputs.query_lens[row], inputs.context_lens[row]
    blocks = -(-context // kv.block_size)
    gathered = kv.gather(inputs.block_tables[row, :blocks])
    keys, values = (pool[:context].transpose(0, 1)[None] for pool in gathered)
    whole = new == context and options.sliding_window is None
    mask = None if whole else _prefill_mask(new, context, options.sliding_window, query.device)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=whole,
        scale=options.scale,
        enable_gqa=query.shape[1] != kv.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _prefill_mask(new: int, context: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool ``[N, C]``, lower triangle aligned to the bottom right."""
    positions = torch.arange(context - new, context, device=device)[:, None]
    columns = torch.arange(context, device=device)[None, :]
    visible = columns <= positions
    if window is not None:
        visible &= columns > positions - window
    return visible
