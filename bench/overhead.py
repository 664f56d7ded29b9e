"""What does the engine add outside the model? Time per batch and per token step, over an executor that does nothing.

N requests of 128 tokens are submitted; the last one closes the batch by size. A batch of one token is the whole way
from there to the last answer: inbox, scheduler, plan, hand-over to the worker thread and back, detokenizer, future.
The time of a further token is the slope between answers of 1 and of 65 tokens. The time inside ``execute`` is
subtracted. Submitting itself, which happens while the window is open, is given apart.

    python -m bench.overhead [--batches 200]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import uvloop

from bench.report import median, write
from microbatch import SamplingParams
from microbatch.core.plan import StepPlan, StepResult
from microbatch.core.policies import make_policy
from microbatch.engine.client import AsyncEngine
from microbatch.executor.fake import FakeExecutor, constant
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager

SIZES = (1, 8, 64)
LONG = 65


class Timed(FakeExecutor):
    """Knows how long it was at work."""

    def __init__(self) -> None:
        super().__init__(constant(65), remember=False)
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        result = super().execute(plan)
        self.seconds += time.perf_counter() - started
        return result


async def measure(size: int, batches: int) -> dict[str, Any]:
    """Microseconds per batch of one token, and per further token step."""
    executor = Timed()
    policy = make_policy("window", {"max_batch_size": size, "window_ms": 1000})
    engine = AsyncEngine(
        lambda: assemble(
            executor, PagedKVManager(8192, 16), policy, ByteTokenizer(), model_name="fake", max_model_len=512
        )
    )
    seen: dict[int, list[float]] = {1: [], LONG: []}
    submits: list[float] = []
    async with engine:
        for _ in range(batches):
            for tokens in (1, LONG):
                executor.seconds = 0.0
                params = SamplingParams(max_tokens=tokens)
                began = time.perf_counter()
                streams = [engine.submit([65] * 128, params) for _ in range(size)]
                closed = time.perf_counter()
                await asyncio.gather(*[stream.collect() for stream in streams])
                seen[tokens].append(time.perf_counter() - closed - executor.seconds)
                submits.append((closed - began) / size)
    batch, long = median(seen[1], 7), median(seen[LONG], 7)
    result = {
        "us_per_batch_of_one_token": round(batch * 1e6),
        "us_per_token_step": round((long - batch) / 64 * 1e6),
        "us_per_submit": round(median(submits, 7) * 1e6),
    }
    print(size, result)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="engine overhead")
    parser.add_argument("--batches", type=int, default=200)
    arguments = parser.parse_args()
    kept = {str(size): uvloop.run(measure(size, arguments.batches)) for size in SIZES}  # the server's event loop
    write("overhead", (__doc__ or "").partition("\n")[0], kept)
