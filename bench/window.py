"""What does batching give? ``window`` at N = 4, 8, 16 against ``serial``: requests/s, latency, K/V memory.

N clients send a request at the same moment and wait for the answer; 128 tokens in, 64 out, the embedded model. Both
policies run in turn on one loaded model, several rounds; figures are medians of rounds, and ratios of them. The K/V
part runs one batch under ``window``, of equal and of ragged lengths, and plain ``generate`` with transformers' own
cache on the same batch: bytes of blocks at the end of the batch against bytes of that cache.

    python -m bench.window [--rounds 3] [--sizes 4,8,16]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from bench.report import median, write
from microbatch import Engine, SamplingParams
from microbatch.core.policies import make_policy
from microbatch.core.policy import Policy

TOKENS_IN, TOKENS_OUT, WINDOW_MS = 128, 64, 50
RAGGED = (16, 32, 64, 96, 128, 192, 256, 512)


async def main(rounds: int, sizes: list[int]) -> dict[str, Any]:
    """All rounds; returns what is kept."""
    async with Engine(prefix_cache=False, max_batch_size=max(sizes)) as engine:
        await one_round(engine, make_policy("serial", {}), [TOKENS_IN] * 2)  # warm up
        speed = {str(n): await compare(engine, n, rounds) for n in sizes}
        memory = {}
        for name, lengths in (("equal", [TOKENS_IN] * 8), ("ragged", list(RAGGED))):
            memory[name] = await kv_memory(engine, lengths)
            print(name, memory[name])
        return {"tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT, "rounds": rounds, "speed": speed, "kv_memory": memory}


async def compare(engine: Engine, n: int, rounds: int) -> dict[str, Any]:
    """Serial and window in turn at N clients."""
    seen: dict[str, list[tuple[float, float]]] = {"serial": [], "window": []}
    for _ in range(rounds):
        seen["serial"].append(await one_round(engine, make_policy("serial", {}), [TOKENS_IN] * n))
        window = make_policy("window", {"max_batch_size": n, "window_ms": WINDOW_MS})
        seen["window"].append(await one_round(engine, window, [TOKENS_IN] * n))
    result: dict[str, Any] = {}
    for name, values in seen.items():
        result[name] = {
            "requests_per_s": median(n / wall for wall, _ in values),
            "mean_latency_s": median(latency for _, latency in values),
            "tokens_per_s": median((n * TOKENS_OUT / wall for wall, _ in values), 1),
        }
    pairs = list(zip(seen["serial"], seen["window"], strict=True))
    result["requests_per_s_ratio"] = median((s[0] / w[0] for s, w in pairs), 2)
    result["mean_latency_ratio"] = median((w[1] / s[1] for s, w in pairs), 2)
    print(n, result)
    return result


async def one_round(engine: Engine, policy: Policy, lengths: list[int]) -> tuple[float, float]:
    """All clients once: seconds until the last answer, and the mean latency of an answer."""
    engine.parts.loop.core.scheduler.policy = policy
    params = SamplingParams(max_tokens=TOKENS_OUT, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    outs = await asyncio.gather(*[engine.generate(prompt(length), params) for length in lengths])
    wall = time.perf_counter() - started
    assert all(out.usage.completion_tokens == TOKENS_OUT for out in outs)
    return wall, sum(out.timings.e2e or 0.0 for out in outs) / len(outs)


async def kv_memory(engine: Engine, lengths: list[int]) -> dict[str, Any]:
    """Bytes of the blocks that a batch holds when it ends, and of transformers' own cache for the same batch."""
    core = engine.parts.loop.core
    executor: Any = engine.parts.loop._executor
    store, peak = executor.model.store, {"blocks": 0, "tokens": 0}
    apply = core.scheduler.apply

    def watched(result: Any, now: float) -> Any:
        blocks = core.scheduler.kv.num_blocks - core.scheduler.kv.num_free_blocks
        tokens = sum(s.num_tokens for s in core.scheduler.running)
        if blocks >= peak["blocks"]:
            peak.update(blocks=blocks, tokens=max(tokens, peak["tokens"]))
        return apply(result, now)

    core.scheduler.apply = watched  # type: ignore[method-assign]
    await one_round(engine, make_policy("window", {"max_batch_size": len(lengths), "window_ms": WINDOW_MS}), lengths)
    core.scheduler.apply = apply  # type: ignore[method-assign]
    paged, needed = peak["blocks"] * store.bytes_per_block, peak["tokens"] * store.bytes_per_token
    contiguous = await asyncio.to_thread(contiguous_bytes, lengths)
    return {
        "rows": len(lengths),
        "bytes_per_token": store.bytes_per_token,
        "blocks": peak["blocks"],
        "paged_bytes": paged,
        "waste": round(1 - needed / paged, 4),
        "transformers_cache_bytes": contiguous,
        "paged_over_transformers": round(paged / contiguous, 3),
    }


def contiguous_bytes(lengths: list[int]) -> int:
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


def prompt(length: int) -> list[int]:
    """Random tokens, so that no two prompts share a beginning."""
    return [random.randrange(1000, 40_000) for _ in range(length)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="window against serial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="4,8,16")
    arguments = parser.parse_args()
    kept = asyncio.run(main(arguments.rounds, [int(n) for n in arguments.sizes.split(",")]))
    write("window", (__doc__ or "").partition("\n")[0], kept)
