"""How much memory does the K/V of a batch take? Blocks of the store against transformers' own contiguous cache.

One batch of 8 under ``window``, 64 tokens out, of about equal and of ragged lengths; none is a multiple of the block
size. The figure is that at the end of the batch, when it is largest: bytes of blocks, the share of them that holds no
token, and the bytes of transformers' cache after plain ``generate`` on the same padded batch.

    python -m bench.kv_memory
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bench.report import write
from microbatch import Engine, SamplingParams

TOKENS_OUT = 64
BATCHES = {"equal": (121, 124, 127, 130, 133, 135, 138, 141), "ragged": (13, 37, 58, 99, 131, 203, 275, 507)}


async def measure(engine: Engine, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Run the batch and note its blocks and tokens when they are most."""
    core = engine.parts.loop.core
    executor: Any = engine.parts.loop._executor
    store, apply, most = executor.model.store, core.scheduler.apply, (0, 0)

    def watched(result: Any, now: float) -> Any:
        nonlocal most
        tokens = sum(s.num_tokens for s in core.scheduler.running)
        most = max(most, (core.scheduler.kv.num_blocks - core.scheduler.kv.num_free_blocks, tokens))
        return apply(result, now)

    core.scheduler.apply = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=TOKENS_OUT, temperature=0, ignore_eos=True)
    prompts = [[random.randrange(1000, 40_000) for _ in range(length)] for length in lengths]
    await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])
    core.scheduler.apply = apply  # type: ignore[method-assign]
    blocks, tokens = most
    paged, contiguous = blocks * store.bytes_per_block, await asyncio.to_thread(contiguous_bytes, lengths)
    return {
        "tokens_in": lengths,
        "bytes_per_token": store.bytes_per_token,
        "blocks": blocks,
        "tokens": tokens,
        "waste": round(1 - tokens / (blocks * store.block_size), 4),
        "paged_bytes": paged,
        "transformers_cache_bytes": contiguous,
        "paged_over_transformers": round(paged / contiguous, 3),
    }


def contiguous_bytes(lengths: tuple[int, ...]) -> int:
    """Bytes of transformers' cache after plain ``generate`` on the padded batch."""
    import torch
    from transformers import GenerationConfig

    from microbatch.executor.loading import ModelSpec, load_model

    model: Any = load_model(ModelSpec()).model
    width = max(lengths)
    ids = torch.full((len(lengths), width), 5)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    config = GenerationConfig(max_new_tokens=TOKENS_OUT, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=mask, generation_config=config)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in out.cache.layers)


async def main() -> dict[str, Any]:
    """Both batches."""
    async with Engine(prefix_cache=False, max_batch_size=8) as engine:
        return {name: await measure(engine, lengths) for name, lengths in BATCHES.items()}


if __name__ == "__main__":
    kept = asyncio.run(main())
    print(kept)
    write("kv_memory", (__doc__ or "").partition("\n")[0], kept)
