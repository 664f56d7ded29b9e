"""K/V in 8 bits through the executors: equal to transformers over a cache that rounds each token by the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig

from microbatch import Engine, SamplingParams
from microbatch.core.policies import WindowPolicy
from microbatch.core.request import FinishReason
from microbatch.core.scheduler import Scheduler
from microbatch.errors import SetupError
from microbatch.executor.generate import GenerateExecutor
from microbatch.executor.loading import LoadedModel
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.probe import attach, layer_specs, store_as
from microbatch.executor.profiling import StepShape
from microbatch.executor.run import PagedModel
from microbatch.executor.serving import put_over_store
from microbatch_kernels.attention_backend import Attend, AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.manager import PagedKVManager
from microbatch_kernels.store import KVStore
from tests.executor import test_generate, test_paged
from tests.executor.tiny import VOCAB, tiny_model

CPU = torch.device("cpu")
BLOCK = 4
PROMPTS = test_paged.PROMPTS
LARGEST = {"int8": 127.0, "fp8": 448.0}


class RoundingCache(DynamicCache):
    """The cache of transformers; each token's heads are rounded to 8 bits as they come."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(self._rounded(key_states), self._rounded(value_states), *args, **kwargs)

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().max(-1, keepdim=True).values / LARGEST[self.name]
        steps = states / scale
        return (steps.round() if self.name == "int8" else steps.to(torch.float8_e4m3fn).float()) * scale


def rounding_greedy(family: str, name: str, counts: list[int]) -> list[list[int]]:
    """Plain transformers, batch of one, over the rounding cache."""
    model, answers = tiny_model(family), []
    for prompt, count in zip(PROMPTS, counts, strict=True):
        ids = torch.tensor([prompt])
        config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=config, cache=RoundingCache(name))
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def paged_model(model: Any, name: str, num_blocks: int = 128, backend: str = "torch") -> PagedModel:
    chosen = choose_backend(backend)
    specs = layer_specs(model)
    paged = attach(model, specs, chosen)
    stored = store_as(model, specs, chosen, name, paged=paged)
    return PagedModel(model, KVStore(stored, num_blocks, BLOCK), chosen, CPU, VOCAB, 0, dense=not paged)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "int8"), ("llama", "fp8"), ("gemma2", "fp8"), ("mistral", "int8"), ("gpt_oss", "int8")],
)
def test_the_packed_loop_equals_transformers_over_a_rounding_cache(family: str, name: str) -> None:
    """Chunked or whole, together or one after the other, with prefix hits and preemptions: a chunk reads what the store
    holds of it, so nothing depends on how a prompt was cut."""
    counts = [18] * 5
    right = rounding_greedy(family, name, counts)
    assert right != test_paged.expected(family, counts), "rounding must show, or this test sees nothing"
    executor = PagedExecutor(paged_model(tiny_model(family), name), [2])
    tight, shared = test_paged.make_scheduler(num_blocks=14, budget=9), test_paged.make_scheduler()
    for s in (tight, shared, shared, test_paged.make_scheduler(budget=7, seqs=1)):
        assert [q.output_token_ids for q in test_paged.run(executor, s, counts=counts)] == right
    assert tight.counters.num_preemptions > 0 and shared.counters.prefix_hit_tokens > 0


@pytest.mark.parametrize(("family", "name"), [("llama", "int8"), ("llama", "fp8"), ("bloom", "fp8"), ("falcon", "fp8")])
def test_generate_equals_it_too_over_pages_and_over_the_dense_gather(family: str, name: str) -> None:
    counts = [18] * 5
    right = rounding_greedy(family, name, counts)
    model = paged_model(tiny_model(family), name)
    assert model.dense is (family in ("bloom", "falcon"))
    executor = GenerateExecutor(model, [2])
    try:
        kv = PagedKVManager(24, BLOCK, prefix_cache=not model.dense)
        s = Scheduler(kv, WindowPolicy(max_batch_size=5, window_ms=0))
        for _ in range(2):
            sequences = test_generate.run(executor, PROMPTS, counts, scheduler=s)
            assert [q.output_token_ids for q in sequences] == right
        assert s.counters.num_preemptions > 0
        assert (s.counters.prefix_hit_tokens > 0) is not model.dense
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind(name: str) -> None:
    model = tiny_model("llama")
    executor = GenerateExecutor(paged_model(model, name), [2])
    store = executor.model.store
    try:
        right = [q.output_token_ids for q in test_generate.run(executor, PROMPTS, [8] * 5, prefix_cache=False)]
        weight = model.model.embed_tokens.weight
        kept = weight[90].clone()
        weight[90] = float("nan")
        bad, good = test_generate.run(executor, [[90, 5, 6], PROMPTS[3]], [8, 8], prefix_cache=False)
        assert bad.finish_reason is FinishReason.ERROR and good.output_token_ids == right[3]
        assert all(torch.isfinite(pool.float()).all() for pool in store.pools)
        weight[90] = kept
        after = test_generate.run(executor, PROMPTS, [8] * 5, prefix_cache=False)
        assert [q.output_token_ids for q in after] == right
    finally:
        executor.close()


def without_scales(
    query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions
) -> torch.Tensor:
    """A backend that forgets the scales."""
    plain = LayerKV(kv.keys.to(query.dtype), kv.values.to(query.dtype))
    return attention_naive(query, plain, inputs, options)


def no_8_bits(query: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
    """A backend that cannot read 8 bits, and says so."""
    if kv.key_scales is not None:
        raise TypeError("this backend reads no scales")
    return attention_naive(query, kv, inputs, options)


@pytest.mark.parametrize(
    ("attend", "reason"), [(without_scales, "logits differ"), (no_8_bits, "this backend reads no scales")]
)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_nonsense_is_refused_at_load_with_the_way_out(attend: Attend, reason: str, name: str) -> None:
    backend = AttentionBackend("broken", attend)
    model = tiny_model("llama")
    specs = layer_specs(model)
    assert attach(model, specs, backend)
    assert store_as(model, specs, backend, "auto", paged=True) == specs
    with pytest.raises(SetupError, match=f"--kv-dtype {name} does not suit .*{reason}.* use --kv-dtype auto"):
        store_as(model, specs, backend, name, paged=True)


def loaded_tiny() -> LoadedModel:
    tokenizer: Any = None
    eos = frozenset({2})
    return LoadedModel(tiny_model("llama"), tokenizer, "tiny", Path(), 256, eos, torch.float32, CPU)


def test_the_store_is_made_in_the_format_that_the_setting_names() -> None:
    stores = {
        name: put_over_store(
            loaded_tiny(), block_size=4, num_blocks=9, num_tokens=36, step=StepShape(2, 36, 36, True), kv_dtype=name
        )[0].store
        for name in ("auto", "int8", "fp8")
    }
    assert [kv.keys.dtype for kv in stores["int8"].kv] == [torch.int8] * 3
    assert [kv.keys.dtype for kv in stores["fp8"].kv] == [torch.float8_e4m3fn] * 3
    assert [kv.keys.dtype for kv in stores["auto"].kv] == [torch.float32] * 3 and len(stores["auto"].pools) == 6
    # Three layers of two heads of 8 numbers, keys and values.
    assert stores["auto"].bytes_per_token == 12 * 8 * 4
    assert stores["int8"].bytes_per_token == stores["fp8"].bytes_per_token == 12 * (8 + 4)


TEXT = """The lighthouse keeper had lived alone on the rock for eleven years when the boat came. It was a small boat
with one sail, and in it sat a woman and a boy who had never seen the sea before that week. She asked whether he was
the man who wrote the letters, and he said that he was, although he had not written one since the winter. Then you
will want to know, she said, that every one of them arrived. The boy climbed the stairs first, counting them aloud,
and at the top he stood for a long time with his hands flat against the glass. Below him the waves came in slow lines,
each with its own thin shadow, and far out a ship was turning towards the harbour. He asked how the ship knew where
the rocks were. The keeper told him that a ship knows nothing, but that the people on it watch for the light and count
the seconds between one flash and the next, and that no two lights on this coast have the same count."""


@pytest.mark.slow
def test_the_embedded_model_reads_as_well_in_8_bits(embedded_model: Path) -> None:
    """Perplexity of a text that goes through the store in chunks stays within 2 %."""
    from bench.kv_dtype import Reader
    from microbatch.executor.loading import ModelSpec, load_model

    loaded = load_model(ModelSpec())
    ids = loaded.tokenizer(TEXT).input_ids
    reader = Reader(loaded, len(ids))
    logits: dict[str, list[torch.Tensor]] = {"auto": [], "fp8": [], "int8": []}
    for _, chunk in reader.chunks(ids, 32):
        for name, values in chunk.items():
            logits[name].append(values)
    targets = torch.tensor(ids[1:])
    loss = {name: float(cross_entropy(torch.cat(parts)[:-1], targets)) for name, parts in logits.items()}
    with torch.no_grad():
        dense: Any = load_model(ModelSpec()).model(torch.tensor([ids]))
    assert abs(loss["auto"] - float(cross_entropy(dense.logits[0, :-1], targets))) < 1e-4
    assert len(ids) > 200 and 1 < loss["auto"] < 4
    for name in ("fp8", "int8"):
        assert 0 < abs(loss[name] - loss["auto"]) < 0.02, f"{name}: {loss[name]:.4f}, auto: {loss['auto']:.4f}"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("policy", ["continuous", "window"])
async def test_an_engine_with_8_bits_answers_sensibly(embedded_model: Path, name: str, policy: str) -> None:
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    async with Engine(kv_dtype=name, policy=policy, max_model_len=256) as engine:
        out = await engine.generate("The capital of France is", params)
        assert "Paris" in out.text and len(out.token_ids) == 32
        assert engine.statistics().num_running == 0
