"""Decode steps in buckets: padding changes no token, the buffers stay where they are, and what cannot be recorded runs
without. Recording itself needs a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from microbatch.core.plan import SequenceStep
from microbatch.core.request import SamplingParams
from microbatch.executor import graphs as module
from microbatch.executor.graphs import DecodeGraphs, Forward, bucket_sizes, can_capture, make_graphs
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.probe import attach, layer_specs
from microbatch.executor.run import PagedModel
from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore, LayerSpec
from tests.executor.test_paged import BLOCK, PROMPTS, make_scheduler, run
from tests.executor.tiny import FAMILIES, VOCAB, greedy_alone, tiny_model

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0)


class Replay:
    """In the place of a CUDA graph: runs the same forward again and leaves the result in the same place."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays: list[int] = []

    def __call__(self, forward: Forward) -> Forward:
        static = forward().clone()
        self.sizes.append(len(static))

        def replay() -> torch.Tensor:
            self.replays.append(len(static))
            return static.copy_(forward())

        return replay


def paged_model(family: str, backend: str = "triton", device: torch.device = CPU, kv_dtype: str = "auto") -> PagedModel:
    pytest.importorskip("triton")
    from tests.microbatch_kernels.triton_cases import device_named

    device_named(device.type)
    model = tiny_model(family).to(device)
    specs = layer_specs(model)
    chosen = choose_backend(backend, device)
    assert attach(model, specs, choose_backend("torch"))
    store = KVStore([spec.stored_as(kv_dtype) for spec in specs], 64, BLOCK)
    return PagedModel(model, store, chosen, device, VOCAB, 0)


def decode(seq_id: int, start: int, block_ids: tuple[int, ...] = (1, 2, 3), **other: Any) -> SequenceStep:
    values: dict[str, Any] = {"token_ids": (7,), "samples": True, **other}
    return SequenceStep(seq_id, start=start, block_ids=block_ids, params=PARAMS, **values)


def test_buckets() -> None:
    assert bucket_sizes(1) == [1] and bucket_sizes(2) == [1, 2] and bucket_sizes(7) == [1, 2, 4, 7]
    assert bucket_sizes(8) == [1, 2, 4, 8] and bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_steps_in_buckets_give_the_same_tokens(family: str) -> None:
    """Sequences come and go, so sizes change; windows, sinks and several blocks are among it."""
    counts = [3, 2, 4, 1, 1]  # three rows at first, in a bucket of four
    right = [greedy_alone(tiny_model(family), p, c) for p, c in zip(PROMPTS, counts, strict=True)]
    model, capture = paged_model(family), Replay()
    executor = PagedExecutor(model, [2], DecodeGraphs(model, 6, 40, capture))
    sequences = run(executor, make_scheduler(), counts=counts)
    assert [s.output_token_ids for s in sequences] == right
    assert capture.replays == [4, 2, 1] and capture.sizes == [4, 2, 1]
    for kv in model.store.kv:
        assert not kv.keys[0].any() and not kv.values[0].any(), "padding was stored in the null block"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_padded_logits_are_those_of_the_step_alone(kv_dtype: str) -> None:
    model, capture = paged_model("llama", kv_dtype=kv_dtype), Replay()
    torch.manual_seed(0)
    for kv in model.store.kv:
        kv.write(torch.randn(256, 2, 8), torch.randn(256, 2, 8), torch.arange(BLOCK, BLOCK + 256))
    graphs = DecodeGraphs(model, 4, 40, capture)
    steps = [decode(0, 9), decode(1, 2, (4,)), decode(2, 30, tuple(range(5, 13)), token_ids=(9,))]
    with torch.no_grad():
        three = graphs.run(steps).clone()
        alone = [graphs.run([step])[0].clone() for step in steps]
        torch.testing.assert_close(three, torch.stack(alone))
        torch.testing.assert_close(graphs.run(steps[:2]), three[:2])  # what the third left behind is not seen
    assert three.shape == (3, VOCAB) and three.isfinite().all() and capture.sizes == [4, 1, 2]


def test_what_fits() -> None:
    graphs = DecodeGraphs(paged_model("llama"), 2, 12, Replay())
    assert graphs.fits([decode(0, 11)]) and graphs.fits([decode(0, 3), decode(1, 4)])
    assert not graphs.fits([decode(0, 3)] * 3), "more rows than the largest bucket"
    assert not graphs.fits([decode(0, 12)]), "a longer context than the buffers hold"
    assert not graphs.fits([decode(0, 3, token_ids=(7, 8))]), "a chunk"
    assert not graphs.fits([decode(0, 3, samples=False)]), "a chunk of one"


def test_every_bucket_is_captured_before_the_first_step_and_only_once() -> None:
    model, capture = paged_model("llama"), Replay()
    graphs = DecodeGraphs(model, 4, 12, capture)
    with torch.no_grad():
        graphs.capture_all()
        graphs.run([decode(0, 3), decode(1, 4, (5, 6, 7))])
    assert capture.sizes == [4, 2, 1] and capture.replays == [2]


def test_only_one_gpu_and_kernels_that_read_there_are_captured() -> None:
    model = paged_model("llama")
    assert not can_capture(model) and make_graphs(model, 4, 12) is None
    meta = [LayerSpec(2, 8, 8, torch.float32, torch.device(f"meta:{i}")) for i in range(2)]
    assert not can_capture(PagedModel(None, KVStore(meta, 2, BLOCK), model.backend, CPU, VOCAB, 0))


def test_a_forward_that_cannot_be_recorded_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(forward: Forward) -> Forward:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(module, "can_capture", lambda model: True)
    monkeypatch.setattr(module, "CudaCapture", lambda: refuse)
    with caplog.at_level(logging.WARNING):
        assert make_graphs(paged_model("llama"), 4, 12) is None
    assert caplog.messages == ["decode steps run without CUDA graphs: operation not permitted when stream is capturing"]
    monkeypatch.setattr(module, "CudaCapture", Replay)
    made = make_graphs(paged_model("llama"), 2, 12)
    assert made is not None and made.buckets == [1, 2]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_forward_waits_for_the_device(family: str) -> None:
    """Tensors without values: whatever reads one on the host, which a recording does not allow, raises."""
    model = tiny_model(family, torch.bfloat16)
    AttentionInterface.register("test_nothing", attend_to_nothing)
    model.set_attn_implementation("test_nothing")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ids = torch.zeros(1, 3, dtype=torch.int64)
        assert model(input_ids=ids, position_ids=ids, use_cache=False).logits.shape == (1, 3, VOCAB)


def attend_to_nothing(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1]), None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_recorded_steps_give_the_same_tokens_on_a_gpu(family: str) -> None:
    device = torch.device("cuda")
    counts = [12, 3, 20, 1, 9]
    model = paged_model(family, device=device)
    eager = run(PagedExecutor(model, [2]), make_scheduler(), counts=counts)
    graphs = make_graphs(model, 6, 64)
    assert graphs is not None
    recorded = run(PagedExecutor(model, [2], graphs), make_scheduler(), counts=counts)
    assert [s.output_token_ids for s in recorded] == [s.output_token_ids for s in eager]


@pytest.mark.gpu
def test_nothing_in_a_step_waits_for_the_gpu() -> None:
    model = paged_model("llama", device=torch.device("cuda"))
    graphs = make_graphs(model, 4, 64)
    assert graphs is not None
    inputs = AttentionInputs.build([((1, 2, 3), 4, 5), ((4,), 2, 1)], BLOCK, model.device)
    query = torch.zeros(6, 6, 8, device=model.device)
    model.backend(query, model.store.kv[0], inputs, AttentionOptions(1.0))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs.run([decode(0, 9), decode(1, 2, (4,))])
        inputs = AttentionInputs.build([((1, 2, 3), 4, 5), ((4,), 2, 1)], BLOCK, model.device)
        model.backend(query, model.store.kv[0], inputs, AttentionOptions(1.0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
