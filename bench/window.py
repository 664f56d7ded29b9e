"""What does batching give? ``window`` at N = 4, 8, 16 against ``serial``: requests/s and latency.

N clients send a request at the same moment and wait for the answer; 128 tokens in, 64 out, the embedded model. Both
policies run in turn on one loaded model, several rounds; figures are medians of rounds, and ratios of them.

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


async def main(rounds: int, sizes: list[int]) -> dict[str, Any]:
    """All rounds; returns what is kept."""
    async with Engine(prefix_cache=False, max_batch_size=max(sizes)) as engine:
        await one_round(engine, make_policy("serial", {}), [TOKENS_IN] * 2)  # warm up
        speed = {str(n): await compare(engine, n, rounds) for n in sizes}
        return {"tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT, "rounds": rounds, "speed": speed}


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
