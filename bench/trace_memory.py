"""How much K/V memory do the requests of a trace need? Blocks against a contiguous cache, counted by the ledger.

Lengths are those of a trace (a CSV with columns ContextTokens and GeneratedTokens), or drawn as in
``bench.continuous``. Waste: slots of blocks that hold no token, over the whole life of every request, one count a
decode step. Concurrency: batches of 16 requests at their end; a contiguous cache, as transformers' own, gives every row
of a batch the length of its longest. No model runs.

    python -m bench.trace_memory [--trace FILE] [--requests 2000]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

from bench.continuous import lengths_of
from bench.report import median, write
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.metadata import num_blocks_for

BATCH = 16


def life(prompt: int, output: int, block_size: int) -> Iterator[tuple[int, int]]:
    """(blocks, tokens) after prefill and after each token but the last, which is never stored."""
    kv = PagedKVManager(num_blocks_for(prompt + output, block_size), block_size, prefix_cache=False)
    kv.begin(0, range(prompt), prompt)
    for tokens in range(prompt, prompt + output):
        kv.allocate(0, tokens)
        yield kv.num_blocks - kv.num_free_blocks, tokens


def waste(pairs: list[tuple[int, int]], block_size: int) -> float:
    """Share of the slots that hold no token."""
    slots = used = 0
    for prompt, output in pairs:
        for blocks, tokens in life(prompt, output, block_size):
            slots, used = slots + blocks * block_size, used + tokens
    return 1 - used / slots


def contiguous_to_paged(pairs: list[tuple[int, int]], block_size: int) -> list[float]:
    """For each batch: slots of the contiguous cache over slots of blocks."""
    ratios = []
    for first in range(0, len(pairs) - BATCH + 1, BATCH):
        ends = [prompt + output for prompt, output in pairs[first : first + BATCH]]
        paged = sum(num_blocks_for(end, block_size) * block_size for end in ends)
        ratios.append(BATCH * max(ends) / paged)
    return ratios


def main(trace: str | None, requests: int) -> dict[str, Any]:
    """Both counts at block sizes of 16 and 32."""
    pairs = random.Random(3).sample(lengths_of(trace), requests)
    whole = [(max(1, round(prompt)), max(1, round(output))) for prompt, output in pairs]
    return {
        str(size): {
            "waste": round(waste(whole, size), 4),
            "contiguous_to_paged": median(contiguous_to_paged(whole, size), 2),
        }
        for size in (16, 32)
    } | {"requests": requests, "mean_tokens": round(sum(map(sum, whole)) / requests)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace")
    parser.add_argument("--requests", type=int, default=2000)
    chosen = parser.parse_args()
    results = main(chosen.trace, chosen.requests)
    print(results)
    write("trace_memory", (__doc__ or "").splitlines()[0], results)
