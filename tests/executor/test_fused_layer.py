"""Whole layers in one call: the same bits as their parts, and the logits of plain transformers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from microbatch.executor import fused
from microbatch.executor.attention import PagedStep
from microbatch.executor.cache import PagedCache
from microbatch.executor.fused_layer import FusedLayer
from microbatch.executor.packing import pack_model
from microbatch.executor.probe import attach, layer_specs, probe_logits
from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore

CPU = torch.device("cpu")
BLOCK = 4
#: Columns of query, key and value fill whole panels on every kind of vector.
SHAPE = {
    "vocab_size": 96, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
}
#: Steps of (start, count) for each of four rows: chunks, then decodes, then both.
STEPS = [[(0, 3), (0, 25), (0, 1), (0, 9)], [(3, 1), (25, 1), (1, 1), (9, 1)], [(4, 1), (26, 1), (2, 30), (10, 1)]]


def make_model(family: str) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **FAMILIES[family]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.25)
    return model.eval().requires_grad_(False)


def put_under(model: Any, library: ctypes.CDLL, weights: torch.dtype = torch.float32) -> list[Any]:
    """Kernels put under; the decoder layers."""
    with torch.no_grad():
        pack_model(model, library, weights)
        fused.fuse_model(model, CpuLayer(library))
    return list(model.model.layers)


@pytest.fixture
def backend(kernel_folder: Path) -> AttentionBackend:
    return choose_backend("cpu", folder=kernel_folder)


@torch.no_grad()
def run(model: Any, backend: AttentionBackend, kv_dtype: str = "auto", row: int | None = None) -> list[torch.Tensor]:
    """Logits of every token of every step, of all rows or of one alone."""
    store = KVStore([s.stored_as(kv_dtype) for s in layer_specs(make_model("llama"))], 60, BLOCK)
    found = []
    for spans in STEPS:
        rows = [(list(range(1 + r * 12, 13 + r * 12)), *span) for r, span in enumerate(spans) if row in (None, r)]
        ids = [
            (7 * r + 5 * p) % 96
            for r, (start, n) in enumerate(spans)
            if row in (None, r)
            for p in range(start, start + n)
        ]
        step = PagedStep(store, backend, AttentionInputs.build(rows, BLOCK, CPU), packed=None)
        positions = [p for _, start, n in rows for p in range(start, start + n)]
        found.append(
            model(
                input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False, paged=step
            ).logits[0]
        )
        assert step.num_calls == len(store.layers)
    return found


@pytest.fixture
def parts_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "PLAIN_LAYERS", frozenset())
        yield


@pytest.mark.parametrize("weights", [torch.float32, torch.int8])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_the_parts(
    family: str, kv_dtype: str, weights: torch.dtype, library: ctypes.CDLL, backend: AttentionBackend
) -> None:
    model = make_model(family)
    assert attach(model, layer_specs(model), backend, packed=True)
    layers = put_under(model, library, weights)
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)
    whole = run(model, backend, kv_dtype)
    for layer in layers:
        layer.forward = layer.forward._original
    assert all(torch.equal(a, b) for a, b in zip(whole, run(model, backend, kv_dtype), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_plain_transformers(family: str, library: ctypes.CDLL, backend: AttentionBackend) -> None:
    plain, model = make_model(family), make_model(family)
    expected = probe_logits(model)
    put_under(model, library)
    assert attach(model, layer_specs(model), backend, packed=True, expected=expected)
    ours = torch.cat([step[-1:] for step in run(model, backend)])
    ids = torch.tensor([[(7 * 3 + 5 * p) % 96 for p in range(11)]])
    theirs = plain(input_ids=ids, use_cache=False).logits[0, [8, 9, 10]]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.2, "weights so small that any answer would pass"


def test_a_row_is_the_same_to_the_bit_alone_and_in_company(library: ctypes.CDLL, backend: AttentionBackend) -> None:
    model = make_model("llama")
    assert attach(model, layer_specs(model), backend, packed=True)
    put_under(model, library)
    together = run(model, backend)
    for row in range(4):
        for spans, all_rows, alone in zip(STEPS, together, run(model, backend, row=row), strict=True):
            first = sum(count for _, count in spans[:row])
            assert torch.equal(all_rows[first : first + spans[row][1]], alone)


@torch.no_grad()
def run_padded(model: Any, backend: AttentionBackend, kv_dtype: str = "auto") -> list[torch.Tensor]:
    """As ``run``, in the layout of ``generate``: rows padded on the left, then one token a row, then a row has left."""
    store = KVStore([s.stored_as(kv_dtype) for s in layer_specs(make_model("llama"))], 60, BLOCK)
    cache, found, mask = PagedCache(len(store.layers), 0), [], torch.zeros(4, 0, dtype=torch.int64)
    for spans, live in (STEPS[0], [0, 1, 2, 3]), (STEPS[1], [0, 1, 2, 3]), ([(4, 1), (26, 1), (2, 1), (10, 1)], [0, 3]):
        width = max(count for _, count in spans)
        ids, packed = torch.zeros(4, width, dtype=torch.int64), []
        for r, (start, count) in enumerate(spans):
            ids[r, width - count :] = torch.tensor([(7 * r + 5 * p) % 96 for p in range(start, start + count)])
            packed += [r * width + width - count + i for i in range(count) if r in live]
        mask = torch.cat([mask, torch.arange(width) >= width - torch.tensor([[count] for _, count in spans])], 1).long()
        rows = [(list(range(1 + r * 12, 13 + r * 12)), *spans[r]) for r in live]
        valid = None if len(packed) == 4 * width else torch.tensor(packed)
        cache.step = PagedStep(store, backend, AttentionInputs.build(rows, BLOCK, CPU), valid)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True).logits
        found.append(logits.flatten(0, 1)[packed])
        assert cache.step.num_calls == len(store.layers)
        assert {layer.get_seq_length() for layer in cache.lengths} == {mask.shape[1]}
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_the_bits_of_the_packed_step(
    family: str, kv_dtype: str, library: ctypes.CDLL, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    assert attach(model, layer_specs(model), backend, packed=True)
    layers = put_under(model, library)
    packed = run(model, backend, kv_dtype)
    with monkeypatch.context() as patch:
        for layer in layers:  # none of the padded steps goes the original way
            patch.setattr(layer.forward, "_original", None)
        padded = run_padded(model, backend, kv_dtype)
    assert torch.equal(padded[0], packed[0]) and torch.equal(padded[1], packed[1])
    # In the third step rows 1 and 2 have left; of the packed one, rows 0 and 3 are its first and last token.
    assert torch.equal(padded[2], packed[2][[0, -1]])


def test_a_padded_batch_has_the_logits_of_the_original_way(library: ctypes.CDLL, backend: AttentionBackend) -> None:
    model = make_model("mistral")
    assert attach(model, layer_specs(model), backend)
    layers = put_under(model, library)
    fused_logits = run_padded(model, backend)
    for layer in layers:
        layer.forward = layer.forward._original
    for a, b in zip(fused_logits, run_padded(model, backend), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        assert a.std() > 0.2


def test_other_backends_take_the_original_way(library: ctypes.CDLL, backend: AttentionBackend) -> None:
    model = make_model("llama")
    expected = probe_logits(model)
    put_under(model, library)
    torch_backend = choose_backend("torch")
    assert attach(model, layer_specs(model), torch_backend, packed=True, expected=expected)
    for a, b in zip(run(model, torch_backend), run(model, backend), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_layers_with_parts_that_do_not_fit_stay(library: ctypes.CDLL, parts_only: None) -> None:
    model = make_model("llama")
    assert not any(isinstance(layer.forward, FusedLayer) for layer in put_under(model, library))
