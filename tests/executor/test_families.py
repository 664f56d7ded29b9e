"""Every family over the packed step: its logits equal those of the model's own dense forward. What cannot be served so
is told apart at load."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microbatch.errors import SetupError
from microbatch.executor import windows
from microbatch.executor.attention import PagedStep
from microbatch.executor.kv_shapes import attended_specs, cached_specs
from microbatch.executor.probe import attach, layer_specs
from microbatch_kernels.attention_backend import AttentionBackend
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore
from tests.executor.tiny import FAMILIES, FOREIGN, STATEFUL, VOCAB, tiny_model

CPU = torch.device("cpu")
BLOCK = 4
#: New tokens of each of four sequences in each step: long and short chunks mixed with decodes, then decodes alone.
STEPS = ((3, 25, 1, 1), (17, 1, 1, 7), (1, 1, 30, 1), (20, 3, 1, 1), (1, 1, 1, 1))
LENGTHS = [sum(counts) for counts in zip(*STEPS)]
BACKENDS = ["naive", "torch", "cpu"]


def random_rows() -> list[list[int]]:
    rnd = random.Random(3)
    return [[rnd.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def dense_logits(family: str, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of every position of every row, alone, by transformers' plainest attention."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def packed_logits(
    model: Any, store: KVStore, backend: AttentionBackend, rows: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The same by packed steps; the blocks of a row lie in no order."""
    sizes = [-(-length // BLOCK) for length in LENGTHS]
    ids = random.Random(4).sample(range(1, store.num_blocks + 1), sum(sizes))
    tables = [ids[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes))]
    starts = [0] * len(rows)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for counts in STEPS:
        spans = [(row, start, start + count) for row, start, count in zip(rows, starts, counts)]
        out = model(
            input_ids=torch.tensor([[t for row, start, end in spans for t in row[start:end]]]),
            position_ids=torch.tensor([[p for _, start, end in spans for p in range(start, end)]]),
            use_cache=False,
            logits_to_keep=torch.arange(sum(counts)),
            paged=PagedStep(
                store, backend, AttentionInputs.build(list(zip(tables, starts, counts)), BLOCK, CPU), packed=None
            ),
        ).logits[0]
        for collected, part in zip(logits, out.split(counts)):
            collected.append(part)
        starts = [end for _, _, end in spans]
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_steps_give_the_logits_of_the_dense_forward(family: str, kernel_folder: Path) -> None:
    rows = random_rows()
    expected = dense_logits(family, rows)
    assert torch.cat(expected).std() > 0.5, "weights so small that any answer would pass"
    for name in BACKENDS:
        backend = choose_backend(name, folder=kernel_folder)
        model = tiny_model(family)
        specs = layer_specs(model)
        assert attach(model, specs, backend, packed=True)
        found = packed_logits(model, KVStore(specs, 50, BLOCK), backend, rows)
        for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda m: f"{name}, row {row}: {m}")


def test_latent_attention_keeps_what_it_attends_to_or_what_it_caches() -> None:
    model = tiny_model("deepseek_v3")
    attended, cached = attended_specs(model), cached_specs(model)
    assert attended is not None and layer_specs(model) == attended
    assert {(s.num_kv_heads, s.key_dim, s.value_dim) for s in attended} == {(6, 16, 12)}
    assert {(s.num_kv_heads, s.key_dim + s.value_dim) for s in cached} == {(1, 16 + 8)}
    assert model.config._attn_implementation == tiny_model("deepseek_v3").config._attn_implementation


@pytest.mark.parametrize("family", sorted(FOREIGN))
@pytest.mark.parametrize("packed", [False, True])
def test_foreign_attention_is_left_as_it_is(family: str, packed: bool) -> None:
    model = tiny_model(family)
    own = model.config._attn_implementation
    assert not attach(model, layer_specs(model), choose_backend(), packed=packed)
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("family", sorted(STATEFUL))
def test_a_model_with_other_state_is_refused(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(SetupError, match=f"(?i){family.replace('_', '')}.*other than keys and values in layer 0"):
        layer_specs(model)


def test_a_model_that_runs_only_inside_generate_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    forward = model.forward

    def deaf(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("paged", None)
        return forward(*args, **kwargs)

    model.forward = deaf
    specs = layer_specs(model)
    assert attach(model, specs, choose_backend())
    model.set_attn_implementation("sdpa")
    with caplog.at_level(logging.WARNING):
        assert not attach(model, specs, choose_backend(), packed=True)
    assert "in the step loop: RuntimeError: paged attention was called without a PagedStep" in caplog.text


def test_a_window_that_never_reaches_our_attention_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of real models are longer than the probe's rows: the logits of the probe would be right."""
    model = tiny_model("llama")
    model.config.sliding_window = 4096
    monkeypatch.setattr(windows, "knows_windows", lambda model: True)
    with caplog.at_level(logging.WARNING):
        assert not attach(model, layer_specs(model), choose_backend())
    assert "layer 0 hides its window" in caplog.text


def test_a_window_in_the_config_of_a_model_that_knows_none_is_no_matter() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = 4096
    assert attach(model, layer_specs(model), choose_backend())


def test_which_models_know_windows() -> None:
    assert [windows.knows_windows(tiny_model(f)) for f in ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")] == [
        False,
        False,
        True,
        True,
        True,
    ]
    foreign = type("Foreign", (torch.nn.Module,), {"__module__": "not.there"})
    assert windows.knows_windows(foreign())


def test_a_model_that_does_not_run_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    specs = layer_specs(model)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shapes do not match\nand more")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(SetupError, match=r"LlamaForCausalLM does not run \(RuntimeError: shapes do not match\)"):
        attach(model, specs, choose_backend())
    with pytest.raises(SetupError, match="does not run with a K/V cache"):
        cached_specs(model)
    assert attended_specs(model) is None


@pytest.mark.parametrize(
    ("fields", "seen", "problem"),
    [
        ({}, [None, None], None),
        ({"sliding_window": 8}, [8, 8], None),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None], None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [None, 8], None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [None, None], "layer 1 hides its window"),
        ({"sliding_window": 8}, [None, None], "layer 0 hides its window"),
        ({}, [None, 8], "layer 1 has an unannounced window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, [None, None], "layer 1 attends in a way of its own"),
        ({"attention_chunk_size": 8192}, [None, None], "layer 0 attends in a way of its own"),
    ],
)
def test_windows_are_those_that_the_config_promises(
    fields: dict[str, Any], seen: list[int | None], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "knows_windows", lambda model: True)
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    assert windows.window_problem(SimpleNamespace(config=config), seen) == problem


@pytest.mark.parametrize("family", ["cohere2", "gemma3_text", "gpt_oss", "qwen2", "qwen2+window", "smollm3"])
def test_promises_are_read_as_transformers_means_them(family: str) -> None:
    config = tiny_model(family).config
    assert windows.promised_windows(config, len(config.layer_types), True) == [
        t == "sliding_attention" for t in config.layer_types
    ]
