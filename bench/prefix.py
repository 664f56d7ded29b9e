"""What does a shared system prompt save? Time to the first token with its K/V in the prefix cache, and without.

A system prompt of 1,000 tokens and a question of 24; the embedded model, policy ``continuous``, one request at a time.
A miss has a salt that nobody had before, so nothing is found for it. Hits and misses take turns; figures are medians.

    python -m bench.prefix [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from typing import Any

from bench.report import median, write
from microbatch import Engine, SamplingParams

SHARED, OWN = 1000, 24


async def ttft(engine: Engine, prompt: list[int], salt: str) -> float:
    """Seconds from arrival to the first token."""
    out = await engine.generate(prompt, SamplingParams(max_tokens=2, temperature=0), cache_salt=salt)
    assert out.timings.ttft is not None
    return out.timings.ttft


async def main(rounds: int) -> dict[str, Any]:
    """All rounds; returns what is kept."""
    rnd = random.Random(5)
    system = [rnd.randrange(1000, 40_000) for _ in range(SHARED)]
    seen: dict[str, list[float]] = {"hit": [], "miss": []}
    async with Engine(policy="continuous") as engine:
        await ttft(engine, [*system, 7], "warm")
        for turn in range(rounds):
            for kind, salt in (("hit", "warm"), ("miss", f"never {turn}")):
                question = [rnd.randrange(1000, 40_000) for _ in range(OWN)]
                seen[kind].append(await ttft(engine, [*system, *question], salt))
    ratio = statistics.median(seen["miss"]) / statistics.median(seen["hit"])
    return {
        "shared_tokens": SHARED,
        "own_tokens": OWN,
        "ttft_s": {kind: median(times) for kind, times in seen.items()},
        "miss_to_hit": round(ratio, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    results = asyncio.run(main(parser.parse_args().rounds))
    print(results)
    write("prefix", (__doc__ or "").splitlines()[0], results)
