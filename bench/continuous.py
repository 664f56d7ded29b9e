"""What does iteration-level batching give on ragged work? ``continuous`` against ``window``, a closed loop of clients.

Lengths are those of a trace (a CSV with columns ContextTokens and GeneratedTokens, such as the Azure LLM inference
trace of conversations), scaled so that its 99th percentile becomes 512 and clipped to 16..512; without a trace,
lengths are drawn from a log-normal distribution of the same shape. Random tokens, ``ignore_eos``, the embedded model.
Both policies answer the same requests in turn, several rounds; figures are medians of rounds.

    python -m bench.continuous [--trace FILE] [--clients 16] [--requests 48] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import statistics
import time
from typing import Any, NamedTuple

from bench.report import median, write
from microbatch import Engine, SamplingParams

SHORTEST, LONGEST = 16, 512
POLICIES = ("window", "continuous")


class Work(NamedTuple):
    """One request: tokens in, tokens out."""

    prompt: list[int]
    tokens: int


def lengths_of(path: str | None) -> list[tuple[float, float]]:
    """(prompt, output) of every request of a trace, or drawn from a distribution of that shape."""
    if path is None:
        rnd = random.Random(3)
        return [(rnd.lognormvariate(6.7, 0.9), rnd.lognormvariate(4.9, 0.8)) for _ in range(4000)]
    with open(path, newline="") as file:
        return [(float(r["ContextTokens"]), float(r["GeneratedTokens"])) for r in csv.DictReader(file)]


def trace_lengths(path: str | None, count: int) -> list[tuple[int, int]]:
    """``count`` pairs of lengths, the same in every run."""
    pairs = lengths_of(path)
    chosen = random.Random(3).sample(pairs, count)
    tops = [statistics.quantiles(column, n=100)[98] for column in zip(*pairs, strict=True)]
    return [(scaled(a, tops[0]), scaled(b, tops[1])) for a, b in chosen]


def scaled(length: float, top: float) -> int:
    return max(SHORTEST, min(LONGEST, round(length * LONGEST / top)))


async def one_round(policy: str, work: list[Work], clients: int) -> dict[str, float]:
    """All requests by so many clients, each with one request at a time."""
    async with Engine(policy=policy, prefix_cache=False, max_batch_size=clients, max_num_seqs=clients) as engine:
        await engine.generate([5] * 8, SamplingParams(max_tokens=2))
        todo, ttfts = iter(work), []

        async def client() -> None:
            for item in todo:
                params = SamplingParams(max_tokens=item.tokens, temperature=0, ignore_eos=True)
                out = await engine.generate(item.prompt, params)
                assert out.usage.completion_tokens == item.tokens
                ttfts.append(out.timings.ttft or 0.0)

        started = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(clients)])
        wall = time.perf_counter() - started
    p95 = statistics.quantiles(ttfts, n=20)[18]
    tokens = sum(item.tokens for item in work)
    return {"tokens_per_s": tokens / wall, "ttft_mean_s": statistics.mean(ttfts), "ttft_p95_s": p95}


async def main(trace: str | None, clients: int, requests: int, rounds: int) -> dict[str, Any]:
    """All rounds; returns what is kept."""
    rnd = random.Random(9)
    lengths = trace_lengths(trace, requests)
    work = [Work([rnd.randrange(1000, 40_000) for _ in range(a)], b) for a, b in lengths]
    seen: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for _ in range(rounds):
        for policy in POLICIES:
            seen[policy].append(await one_round(policy, work, clients))
            print(policy, seen[policy][-1], flush=True)
    result: dict[str, Any] = {
        "clients": clients,
        "requests": requests,
        "rounds": rounds,
        "lengths": "trace" if trace else "log-normal",
        "tokens_in_mean": round(statistics.mean(a for a, _ in lengths)),
        "tokens_out_mean": round(statistics.mean(b for _, b in lengths)),
    }
    for policy, values in seen.items():
        result[policy] = {name: median((v[name] for v in values), 3) for name in values[0]}
    pairs = list(zip(seen["window"], seen["continuous"], strict=True))
    result["tokens_per_s_ratio"] = median((c["tokens_per_s"] / w["tokens_per_s"] for w, c in pairs), 2)
    result["ttft_p95_ratio"] = median((c["ttft_p95_s"] / w["ttft_p95_s"] for w, c in pairs), 3)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="continuous against window")
    parser.add_argument("--trace")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    kept = asyncio.run(main(arguments.trace, arguments.clients, arguments.requests, arguments.rounds))
    print(kept)
    write("continuous", (__doc__ or "").partition("\n")[0], kept)
