"""Preemption by recompute or by swap, forks and the prefix cache change no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microbatch.core.policies import ContinuousPolicy
from microbatch.core.request import Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.run import PagedModel
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.host_pool import HostPool
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.store import KVStore
from tests.executor.tiny import VOCAB, tiny_model

BLOCK = 4
PROMPTS = [[5 + (i * 7 + k) % 80 for i in range(length)] for k, length in enumerate([6, 21, 3, 13, 8])]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5},
}
#: Blocks on the device, blocks in host memory.
PLENTY, RECOMPUTE, SWAP = (200, 0), (16, 0), (16, 40)


def executor_with(num_blocks: int, host_blocks: int, kv_dtype: str = "auto") -> PagedExecutor:
    model, backend = tiny_model("llama"), choose_backend("torch")
    specs = layer_specs(model)
    assert attach(model, specs, backend)
    store = KVStore([s.stored_as(kv_dtype) for s in specs], num_blocks, BLOCK)
    paged = PagedModel(model, store, backend, torch.device("cpu"), VOCAB, 0)
    return PagedExecutor(replace(paged, host=HostPool(store.pools, host_blocks)) if host_blocks else paged, [2])


def run(blocks: tuple[int, int], n: int, prefix_cache: bool, kv_dtype: str = "auto", **sampling: Any) -> Any:
    """Tokens of every choice of every request, and the counters."""
    executor = executor_with(*blocks, kv_dtype)
    kv = PagedKVManager(blocks[0], BLOCK, prefix_cache=prefix_cache, num_host_blocks=blocks[1])
    s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8), max_num_batched_tokens=11)
    sequences = []
    for k, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=14 + k, n=n, **sampling)
        request = Request(str(k), tuple(prompt), params, 0.0)
        sequences += s.add(request, seed=k, max_total_tokens=len(prompt) + 14 + k)
    step = 0
    while not s.idle:
        step += 1
        plan = s.schedule(float(step))
        if plan is not None:
            s.apply(executor.execute(plan), float(step))
            s.check_integrity()
    assert kv.num_free_blocks == kv.num_blocks and kv.num_swapped == 0
    assert len({len(q.output_token_ids) for q in sequences}) > 1
    return [q.output_token_ids for q in sequences], s.counters


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", SAMPLING)
def test_no_token_depends_on_blocks_host_memory_or_cache(how: str, n: int) -> None:
    right, _ = run(PLENTY, n, prefix_cache=False, **SAMPLING[how])
    for prefix_cache in (False, True):
        assert run(PLENTY, n, prefix_cache, **SAMPLING[how])[0] == right
        tokens, counters = run(RECOMPUTE, n, prefix_cache, **SAMPLING[how])
        assert tokens == right and counters.num_preemptions > 0
        tokens, counters = run(SWAP, n, prefix_cache, **SAMPLING[how])
        assert tokens == right and counters.num_preemptions > 0 and counters.swapped_in_blocks > 0


def test_choices_of_a_request_differ_and_share_their_prompt() -> None:
    tokens, _ = run(PLENTY, 3, prefix_cache=False, **SAMPLING["seeded"])
    assert len({tuple(t) for t in tokens[3:6]}) == 3
    first, _ = run(PLENTY, 1, prefix_cache=False, **SAMPLING["seeded"])
    assert tokens[::3] == first, "choice 0 has the seed of the request"


def test_swap_with_k_v_of_8_bits() -> None:
    right, _ = run(PLENTY, 1, prefix_cache=False, kv_dtype="int8", temperature=0)
    tokens, counters = run(SWAP, 1, prefix_cache=False, kv_dtype="int8", temperature=0)
    assert tokens == right and counters.swapped_in_blocks > 0


def test_a_plan_that_swaps_without_host_memory_is_an_error() -> None:
    executor = executor_with(16, 0)
    kv = PagedKVManager(16, BLOCK, num_host_blocks=8)
    s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8), max_num_batched_tokens=64)
    for k, prompt in enumerate(PROMPTS):
        s.add(
            Request(str(k), tuple(prompt), SamplingParams(max_tokens=30, temperature=0), 0.0),
            seed=k,
            max_total_tokens=60,
        )
    with pytest.raises(ValueError, match="there is no host memory"):
        for step in range(200):
            plan = s.schedule(float(step))
            assert plan is not None
            s.apply(executor.execute(plan), float(step))
