"""How the Triton attention kernels are launched: what they can do, sizes of tiles, splits of a context, arguments."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_tiles import LOG2E, attend

#: Whether TRITON_INTERPRET was set when triton was imported: kernels then run on the CPU, for tests.
INTERPRETED: Final = not isinstance(attend, JITFunction)
#: Splits of one context, at most: the combining kernel holds all of a head's at once.
MOST_SPLITS: Final = 64

#: ``tl.dot`` takes no side shorter than this.
_SHORTEST_SIDE: Final = 16
_LARGEST_DIM: Final = 512
_DTYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_SCALED: Final = (torch.int8, torch.float8_e4m3fn)


class Scales(NamedTuple):
    """Factors of K/V kept in 8 bits: float32 ``[num_blocks + 1, block_size, num_kv_heads]``, one a token and head."""

    keys: torch.Tensor
    values: torch.Tensor


class Tiles(NamedTuple):
    """``block_m`` queries (token and head) meet ``block_n`` tokens of context at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2


def choose_tiles(query: torch.Tensor, kv: LayerKV, num_tokens: int) -> Tiles:
    """Tiles for ``num_tokens`` successive new tokens, with the heads that share a K/V head.

    The largest that leave hardly a number without a register and fit into the shared memory of an RTX 3090, as compiled
    (``tests/microbatch_kernels/test_triton_compile.py``); ``bench.gpu`` can say whether they are the fastest.
    """
    group = query.shape[1] // kv.num_kv_heads
    row_bytes = padded(query.itemsize * (padded(kv.keys.shape[-1]) + padded(kv.values.shape[-1])))
    largest = 32 if query.itemsize == 4 else 64
    block_m = padded(min(num_tokens * group, max(min(largest, 2**16 // row_bytes), group)))
    block_n = max(_SHORTEST_SIDE, min(largest, 2**15 // row_bytes))
    return Tiles(block_m, block_n, num_warps=8 if row_bytes > 512 or block_m > largest else 4)


def choose_num_splits(num_programs: int, max_context: int, block_n: int, num_processors: int) -> int:
    """Pieces to cut every context into, so that about two programs find work on each processor: a power of 2."""
    wanted = 2 * num_processors // max(1, num_programs)
    useful = int(triton.next_power_of_2(triton.cdiv(max_context, block_n)))
    return max(1, min(1 << wanted.bit_length() >> 1, useful, MOST_SPLITS))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Of a GPU, the multiprocessors. Few for the interpreter, as it runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def padded(size: int) -> int:
    """``size`` as the kernels can hold it: a power of 2."""
    return max(_SHORTEST_SIDE, int(triton.next_power_of_2(size)))


def check(query: torch.Tensor, kv: LayerKV, scales: Scales | None) -> None:
    """``ValueError`` for what the kernels cannot do."""
    if query.dtype not in _DTYPES:
        raise ValueError(f"triton attention takes float32, float16 and bfloat16, not {query.dtype}")
    dim = max(kv.keys.shape[-1], kv.values.shape[-1])
    if dim > _LARGEST_DIM:
        raise ValueError(f"triton attention takes head sizes up to {_LARGEST_DIM}, not {dim}")
    if query.shape[1] % kv.num_kv_heads or query.shape[2] != kv.keys.shape[-1]:
        raise ValueError(f"queries {list(query.shape)} do not fit keys {list(kv.keys.shape)}")
    if (kv.keys.dtype in _SCALED) is not (scales is not None):
        raise ValueError(f"K/V of {kv.keys.dtype} {'need' if scales is None else 'take no'} scales")


def common_arguments(
    query: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions,
    scales: Scales | None,
    tiles: Tiles,
) -> dict[str, Any]:
    """The arguments that both attention kernels take, by name. What a flag says is not there is never read."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    scale, softcap = _score_factors(options)
    key_dim, value_dim = kv.keys.shape[-1], kv.values.shape[-1]
    return {
        "query": query,
        "keys": _bits(kv.keys),
        "values": _bits(kv.values),
        "key_scales": query if scales is None else scales.keys,
        "value_scales": query if scales is None else scales.values,
        "sinks": query if options.sinks is None else options.sinks,
        "query_starts": inputs.query_starts,
        "context_lens": inputs.lens,
        "block_tables": inputs.block_tables,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "table_row_stride": inputs.block_tables.stride(0),
        "table_column_stride": inputs.block_tables.stride(1),
        "window": options.sliding_window or 0,
        "scale": scale,
        "softcap": softcap,
        "BLOCK_SIZE": kv.block_size,
        "HEADS": query.shape[1],
        "KV_HEADS": kv.num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PAD": padded(key_dim),
        "VALUE_PAD": padded(value_dim),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "HAS_WINDOW": options.sliding_window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "HAS_SCALES": scales is not None,
        "DOT": _product_type(query),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _product_type(query: torch.Tensor) -> Any:
    """The type that products are made in: the query's. The interpreter lacks products of bfloat16 (it multiplies their
    bits), so there it is float32."""
    return tl.float32 if INTERPRETED and query.dtype is torch.bfloat16 else _DTYPES[query.dtype]


def _score_factors(options: AttentionOptions) -> tuple[float, float]:
    """``scale`` and ``softcap`` as ``triton_tiles.attend`` takes them."""
    log2e = float(LOG2E.value)
    if options.softcap is None:
        return options.scale * log2e, 1.0
    return options.scale / options.softcap, options.softcap * log2e


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """Floats of 8 bits as bytes, which the kernels take apart themselves."""
    return pool.view(torch.uint8) if pool.dtype is torch.float8_e4m3fn else pool
