"""The profiling step: as large as the settings allow, smaller where that does not fit; and the pool sized by it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from microbatch import Engine, SamplingParams
from microbatch.core.policies import make_policy
from microbatch.core.policy import Policy
from microbatch.errors import SetupError
from microbatch.executor import profiling, serving
from microbatch.executor.loading import LoadedModel, ModelSpec, load_model
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.profiling import StepShape, estimate, flops_a_token, profile_step
from microbatch.executor.run import PagedModel
from microbatch.executor.serving import put_over_store
from microbatch.settings import make_settings
from microbatch.wiring import largest_step
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore
from tests.executor.test_memory import GIB, MIB, FakeGpu
from tests.executor.tiny import FOREIGN, VOCAB, tiny_model
from tests.executor.tiny_models import save_llama

CPU = torch.device("cpu")
PACKED = StepShape(8, 100, 64, packed=True)
PADDED = StepShape(3, 60, 64, packed=False)


def over_scratch(family: str = "llama") -> PagedModel:
    model, backend = tiny_model(family), choose_backend()
    specs = layer_specs(model)
    paged = attach(model, specs, backend)
    return PagedModel(model, KVStore(specs, 1, 4), backend, CPU, VOCAB, 0, dense=not paged)


class Forwards:
    """Notes the shape of every forward; those of more than ``limit`` tokens run out of memory."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, limit: int = 10**9) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.limit = limit
        original: Callable[..., Any] = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs["input_ids"]
            if ids.numel() > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            self.shapes.append(tuple(ids.shape))
            return original(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward)


@pytest.mark.parametrize(("step", "shape"), [(PACKED, (1, 100)), (PADDED, (3, 20))], ids=["packed", "padded"])
def test_the_whole_step_is_run_and_its_peak_is_the_answer(
    step: StepShape, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = over_scratch()
    forwards = Forwards(model.model, monkeypatch)
    profile = profile_step(model, step, FakeGpu(GIB, 0, peak=12345))
    assert (profile.step, profile.activations, profile.how) == (step, 12345, "measured")
    assert forwards.shapes == [shape]
    assert all(bool(torch.isfinite(pool).all()) for pool in model.store.pools)


@pytest.mark.parametrize("family", sorted(FOREIGN))
def test_a_model_over_the_dense_gather_is_profiled_too(family: str) -> None:
    assert profile_step(over_scratch(family), PADDED, FakeGpu(GIB, 0, peak=7)).activations == 7


def test_on_a_cpu_a_part_is_run_and_the_rest_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = over_scratch()
    forwards = Forwards(model.model, monkeypatch)
    per_token = 2 * (3 * (4 * 48**2 + 3 * 48 * 64) + 48 * VOCAB)
    assert flops_a_token(model) == per_token
    monkeypatch.setattr(profiling, "_CPU_FLOPS", 25 * per_token)
    profile = profile_step(model, PACKED, FakeGpu(GIB, 0, peak=1000))
    assert (profile.activations, profile.how, profile.step) == (4000, "extrapolated", PACKED)
    assert forwards.shapes == [(1, 25)]


def test_on_a_gpu_a_prompt_with_the_step_for_itself_is_run_too() -> None:
    model = replace(over_scratch(), device=torch.device("cuda"))
    assert [part.lengths for part in profiling._parts(model, PACKED)] == [[13] * 4 + [12] * 4, [64]]
    assert profiling._parts(model, PADDED) == [PADDED]


def test_a_step_that_does_not_fit_is_halved_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = over_scratch()
    forwards = Forwards(model.model, monkeypatch, limit=40)
    with caplog.at_level(logging.WARNING):
        profile = profile_step(model, PACKED, FakeGpu(GIB, 0, peak=5))
    assert profile.step.num_tokens == 25 and forwards.shapes == [(1, 25)]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("a step of 100 tokens in 8 sequences does not fit (out of memory in a step of 100 tokens")
    assert "trying a step of 50 tokens in 4 sequences; lower --max-num-batched-tokens" in first
    assert "trying a step of 25 tokens in 2 sequences" in second


def test_where_nothing_fits_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = over_scratch()
    Forwards(model.model, monkeypatch, limit=3)
    with pytest.raises(SetupError, match="a step of 25 tokens in 2 sequences does not fit beside the weights.*quantiz"):
        profile_step(model, PACKED, FakeGpu(GIB, 0))


def test_a_peak_that_cannot_be_seen_is_estimated_by_shapes() -> None:
    model = over_scratch()
    profile = profile_step(model, PACKED, FakeGpu(GIB, 0, peak=None))
    assert profile.how == "estimated" and profile.activations == estimate(model, PACKED)
    assert profile.activations == 100 * (8 * 48 + 4 * 64) * 4 + 6 * 8 * VOCAB * 4


# ---- from the settings to the pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_llama(place)
    return place


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSpec(str(folder)))


def put(loaded: LoadedModel, **changes: Any) -> tuple[PagedModel, StepShape]:
    arguments: dict[str, Any] = {"block_size": 16, "num_blocks": None, "num_tokens": 512, "step": PACKED}
    return put_over_store(loaded, **{**arguments, **changes})


def test_a_pool_that_is_given_needs_no_profile(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "profile_step", lambda *args: pytest.fail("profiled"))
    model, step = put(loaded, num_blocks=33)
    assert model.store.num_blocks == 33 and step == PACKED


def test_on_a_cpu_the_pool_is_what_the_contexts_want(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model, _ = put(loaded)
    assert model.store.num_blocks == 32
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory:")]
    assert lines[0].startswith("memory: weights ") and "in a step of 100 tokens in 8 sequences (" in lines[0]
    assert lines[1].endswith("512 tokens of 512 bytes; room for 8.0 sequences of 64 tokens") and len(lines) == 2


def test_the_share_and_the_activations_bound_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 16 * 512
    monkeypatch.setattr(serving, "memory_of", lambda device: FakeGpu(MIB, 0, peak=10 * per_block))
    model, _ = put(loaded, num_tokens=10**6, memory_utilization=0.5)
    assert model.store.num_blocks == 64 - 10 - 1
    assert sum(pool.nbytes for pool in model.store.pools) == 54 * per_block


def test_no_room_beside_the_activations_is_a_setup_error(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "memory_of", lambda device: FakeGpu(MIB, MIB // 2, peak=10))
    with pytest.raises(SetupError, match="no memory left for K/V blocks of 8.0 KiB"):
        put(loaded, memory_utilization=0.5)


def test_a_pool_that_cannot_be_had_names_the_setting(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="no memory for .* K/V blocks of 8.0 KiB: lower --kv-blocks"):
        put(loaded, num_blocks=2**45)


@pytest.mark.parametrize(
    ("policy", "fields", "wanted"),
    [
        (make_policy("continuous", {"max_num_seqs": 5}), {}, StepShape(5, 2048, 4096, True)),
        (make_policy("continuous", {}), {"max_num_batched_tokens": 77}, StepShape(64, 77, 4096, True)),
        (make_policy("window", {"max_batch_size": 3}), {}, StepShape(3, 3072, 4096, False)),
        (make_policy("serial", {}), {}, StepShape(1, 1024, 4096, False)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_largest_step_is_that_of_the_policy(policy: Policy, fields: dict[str, Any], wanted: StepShape) -> None:
    assert largest_step(policy, make_settings(fields), 4096) == wanted


@pytest.mark.anyio
async def test_the_engine_serves_with_the_step_that_fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts although the settings ask for too much, and no step runs out of memory afterwards."""
    forward, failed, largest = LlamaForCausalLM.forward, [], []

    def tight(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs["input_ids"].numel()
        if tokens > 64:
            failed.append(tokens)
            raise torch.OutOfMemoryError("no memory")
        largest.append(tokens)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", tight)
    async with Engine(str(folder), policy="continuous", max_num_batched_tokens=100, max_num_seqs=4) as engine:
        assert failed == [100]
        largest.clear()
        prompt = [5 + i % 200 for i in range(120)]
        output = await engine.generate(prompt, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert len(output.token_ids) == 3
        assert failed == [100] and max(largest) == 50
        statistics = engine.statistics()
        assert statistics.kv_bytes_per_token == 512
        assert statistics.kv_cache_bytes == 512 * 16 * statistics.num_blocks


@pytest.mark.anyio
async def test_a_model_on_the_dense_gather_cannot_join_between_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", lambda: False)
    with pytest.raises(SetupError, match="that of LlamaForCausalLM cannot: use --policy window"):
        async with Engine(str(folder), policy="continuous"):
            pass
