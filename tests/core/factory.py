"""Small makers for tests of the core."""

from __future__ import annotations

from typing import Any

from microbatch.core.policies import SerialPolicy, WindowPolicy
from microbatch.core.policy import Policy
from microbatch.core.request import Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch_kernels.manager import PagedKVManager

EOS = 2


def scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    policy: Policy | None = None,
    prefix_cache: bool = True,
    max_num_batched_tokens: int = 2048,
    num_host_blocks: int = 0,
) -> Scheduler:
    kv = PagedKVManager(num_blocks, block_size, prefix_cache=prefix_cache, num_host_blocks=num_host_blocks)
    return Scheduler(
        kv,
        policy or WindowPolicy(max_batch_size=4, window_ms=50),
        eos_token_ids=[EOS],
        max_num_batched_tokens=max_num_batched_tokens,
    )


def serial(**options: Any) -> Scheduler:
    return scheduler(policy=SerialPolicy(), **options)


def request(
    name: str,
    prompt: int | list[int] = 5,
    arrival: float = 0.0,
    *,
    options: dict[str, Any] | None = None,
    **params: Any,
) -> Request:
    ids = tuple(prompt) if isinstance(prompt, list) else tuple(10 + i % 7 for i in range(prompt))
    return Request(name, ids, SamplingParams(**{"max_tokens": 8, **params}), arrival, **(options or {}))


def add(s: Scheduler, r: Request, seed: int = 1) -> list[Sequence]:
    total = len(r.prompt_token_ids) + (r.params.max_tokens or 8)
    return s.add(r, seed=seed, max_total_tokens=total)
