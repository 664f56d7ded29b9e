"""Models with the C kernels put under: every family gives what plain transformers gives, and what was replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from microbatch.executor.cpu_kernels import CpuKernels
from microbatch.executor.fused import _FusedAttention
from microbatch.executor.fused_layer import FusedLayer
from microbatch.executor.generate import GenerateExecutor
from microbatch.executor.loading import LoadedModel
from microbatch.executor.packing import PackedEmbedding, PackedLinear, packed_tensors
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.profiling import StepShape
from microbatch.executor.run import PagedModel
from microbatch.executor.serving import put_over_store
from microbatch_kernels.cpu_library import cpu_library
from microbatch_kernels.packed_weight import PackedWeight
from tests.executor import test_generate, test_paged
from tests.executor.test_families import BLOCK, dense_logits, packed_logits, random_rows
from tests.executor.tiny import FAMILIES, FOREIGN, VOCAB, greedy_alone, tiny_model

CPU = torch.device("cpu")
STEP = StepShape(num_seqs=8, num_tokens=64, max_len=64, packed=True)
COUNTS = [12, 3, 20, 1, 9]


def put_under(
    model: Any, folder: Path, weights: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32, **fields: Any
) -> PagedModel:
    """As the server does it."""
    nothing: Any = None
    loaded = LoadedModel(model, nothing, "tiny", folder, 64, frozenset({2}), dtype, CPU)
    kernels = CpuKernels(folder, weights)
    over = {"block_size": BLOCK, "num_blocks": 128, "num_tokens": 512, "step": STEP, "kernels": kernels, **fields}
    return put_over_store(loaded, **over)[0]


def modules(model: Any, kind: type[Any]) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is kind]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gives_the_logits_of_transformers(family: str, kernel_folder: Path) -> None:
    rows = random_rows()
    expected = dense_logits(family, rows)
    ready = put_under(tiny_model(family), kernel_folder)
    packed = modules(ready.model, PackedLinear)
    assert (packed or family == "gpt2") and not modules(ready.model, torch.nn.Linear)
    for ours, theirs in zip(packed_logits(ready.model, ready.store, ready.backend, rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama", "mistral", "qwen2"}))
def test_every_family_chooses_the_tokens_of_transformers(family: str, kernel_folder: Path) -> None:
    right = test_paged.expected(family, COUNTS)
    executor = PagedExecutor(put_under(tiny_model(family), kernel_folder), [2])
    sequences = test_paged.run(executor, test_paged.make_scheduler(budget=7), counts=COUNTS)
    assert [s.output_token_ids for s in sequences] == right


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "qwen2"])
def test_generate_chooses_them_too(family: str, kernel_folder: Path) -> None:
    right = test_paged.expected(family, COUNTS)
    executor = GenerateExecutor(put_under(tiny_model(family), kernel_folder, step=replace(STEP, packed=False)), [2])
    try:
        sequences = test_generate.run(executor, test_generate.PROMPTS, COUNTS, batch=5)
        assert [s.output_token_ids for s in sequences] == right
    finally:
        executor.close()


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_model_over_the_dense_gather_has_its_linear_layers_packed(family: str, kernel_folder: Path) -> None:
    assert family in FOREIGN
    right = [greedy_alone(tiny_model(family), p, c) for p, c in zip(test_generate.PROMPTS, COUNTS, strict=True)]
    ready = put_under(tiny_model(family), kernel_folder, step=replace(STEP, packed=False))
    assert ready.dense and modules(ready.model, PackedLinear)
    executor = GenerateExecutor(ready, [2])
    try:
        sequences = test_generate.run(executor, test_generate.PROMPTS, COUNTS, batch=5, prefix_cache=False)
        assert [s.output_token_ids for s in sequences] == right
    finally:
        executor.close()


# ---- models whose columns of query, key and value fill whole panels

_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def wide_model(family: str, std: float = 0.25, **fields: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**_WIDE, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, std)
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


def replaced(model: Any) -> dict[str, bool]:
    """Of the first layer and the last norm, what has another forward."""
    layer = model.model.layers[0]
    parts = {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp, "norm": model.model.norm}
    return {name: "forward" in vars(part) for name, part in parts.items()}


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {}, "layer attention mlp norm"),
        ("llama", {"attention_bias": True}, "layer attention mlp norm"),
        ("llama", {"mlp_bias": True}, "attention norm"),
        ("llama", {"hidden_act": "gelu"}, "attention norm"),
        ("llama", {"head_dim": 20, "num_key_value_heads": 1}, "mlp norm"),
        ("qwen2", {}, "layer attention mlp norm"),
        ("mistral", {"sliding_window": 6}, "layer attention mlp norm"),
        ("qwen3", {}, "mlp norm"),
        ("gemma", {}, ""),
        ("phi3", {}, "norm"),
    ],
)
def test_what_is_replaced(family: str, fields: dict[str, Any], expected: str, kernel_folder: Path) -> None:
    ready = put_under(wide_model(family, **fields), kernel_folder)
    assert [name for name, yes in replaced(ready.model).items() if yes] == expected.split()
    layer = ready.model.model.layers[0]
    assert isinstance(layer.self_attn.forward, _FusedAttention) is ("attention" in expected)
    assert isinstance(layer.forward, FusedLayer) is ("layer" in expected)
    if family == "mistral":
        assert layer.self_attn.forward.options.sliding_window == 6


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "relu"])
def test_a_gate_that_is_not_silu_stays_however_small_the_weights(act: str, kernel_folder: Path) -> None:
    """A trial whose results are all near zero tells nothing."""
    ready = put_under(wide_model("llama", std=0.005, hidden_act=act), kernel_folder)
    assert replaced(ready.model)["attention"] and not replaced(ready.model)["mlp"]


@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {}), ("qwen2", {}), ("mistral", {"sliding_window": 6}), ("qwen3", {})]
)
def test_wide_models_choose_the_tokens_of_transformers(
    family: str, fields: dict[str, Any], kernel_folder: Path
) -> None:
    plain = wide_model(family, **fields)
    right = [greedy_alone(plain, p, c) for p, c in zip(test_paged.PROMPTS, COUNTS, strict=True)]
    ready = put_under(wide_model(family, **fields), kernel_folder)
    for budget in (2048, 7):
        found = test_paged.run(PagedExecutor(ready, [2]), test_paged.make_scheduler(budget=budget), counts=COUNTS)
        assert [s.output_token_ids for s in found] == right
    executor = GenerateExecutor(put_under(wide_model(family, **fields), kernel_folder), [2])
    try:
        assert [
            s.output_token_ids for s in test_generate.run(executor, test_generate.PROMPTS, COUNTS, batch=5)
        ] == right
    finally:
        executor.close()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.int8])
def test_logits_are_the_same_to_the_bit_alone_in_company_and_after_recompute(
    weights: torch.dtype, kernel_folder: Path
) -> None:
    ready = put_under(wide_model("llama"), kernel_folder, weights)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    sample = PagedExecutor._sample

    def note(self: PagedExecutor, plan: Any, logits: torch.Tensor, seq_ids: list[int]) -> Any:
        result = sample(self, plan, logits, seq_ids)
        for seq_id, row in zip(seq_ids, logits[: len(seq_ids)], strict=True):  # one row for nobody in a chunk
            texts[seq_id] = (*texts.get(seq_id, (seq_id % 5,)), result.token_ids[seq_id])
            assert torch.equal(seen.setdefault(texts[seq_id], row.clone()), row), "other bits"
        return result

    texts: dict[int, tuple[int, ...]] = {}  # which prompt, and the tokens after it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedExecutor, "_sample", note)
        for scheduler in (
            test_paged.make_scheduler(),
            test_paged.make_scheduler(seqs=1),
            test_paged.make_scheduler(budget=7),
            test_paged.make_scheduler(num_blocks=14, budget=9, prefix_cache=False),
        ):
            texts.clear()
            test_paged.run(PagedExecutor(ready, [2]), scheduler, counts=[18] * 5)
        assert scheduler.counters.num_preemptions > 0
    assert len(seen) <= 5 * 18


# ---- weights


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_shares_one_packed_weight(tied: bool, kernel_folder: Path) -> None:
    plain = wide_model("llama", tie_word_embeddings=tied)
    table = plain.get_input_embeddings().weight.clone()
    model = put_under(wide_model("llama", tie_word_embeddings=tied), kernel_folder).model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding) is tied
    assert torch.equal(embedding.weight, table)
    pointers = [tensor.data_ptr() for tensor in packed_tensors(model)]
    assert pointers.count(head.packed.panels.data_ptr()) == 1 + tied
    ids = torch.tensor([[3, 0, VOCAB - 1]])
    assert torch.equal(embedding(ids), table[ids])


@pytest.mark.parametrize(("weights", "error"), [(torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)])
def test_smaller_weights_are_the_rounded_ones(weights: torch.dtype, error: float, kernel_folder: Path) -> None:
    """The same logits as transformers over the rounded weights; those are near the exact ones."""
    ready = put_under(wide_model("llama"), kernel_folder, weights)
    model, plain = ready.model, wide_model("llama")
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            kept = model.get_submodule(name).weight
            assert 0 < (kept - module.weight).abs().max() <= error * 1.001 * module.weight.abs().max()
            if weights is torch.bfloat16:
                assert torch.equal(kept, module.weight.bfloat16().float())
            module.weight.data = kept
    rows = random_rows()
    for row, ours in zip(rows, packed_logits(model, ready.store, ready.backend, rows), strict=True):
        theirs = plain(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_models_in_bfloat16_and_other_backends_are_left_alone(kernel_folder: Path) -> None:
    model = wide_model("llama").to(torch.bfloat16)
    left = put_under(model, kernel_folder, dtype=torch.bfloat16).model
    assert not modules(left, PackedLinear) and not any(replaced(left).values())
    left = put_under(wide_model("llama"), kernel_folder, attention="torch").model
    assert not modules(left, PackedLinear) and not any(replaced(left).values())


def test_ids_beyond_the_table_are_refused(kernel_folder: Path) -> None:
    packed = PackedWeight.pack(cpu_library(kernel_folder), torch.randn(5, 3))
    for bad in (-1, 5, 40):
        with pytest.raises(IndexError):
            PackedEmbedding(packed)(torch.tensor([0, bad]))
