"""Tiny random models built from a config: no files, a few thousand weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

VOCAB = 96
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_HEAD = {**_LLAMA, "head_dim": 16}

#: Family by model_type: config fields. Windows are short so that every test crosses them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _HEAD,
    "mistral": {**_LLAMA, "sliding_window": 6},
    "gemma2": {**_HEAD, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD, "sliding_window": 6, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "phi3": _LLAMA,
    "gpt2": {**_COMMON, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512},
    "opt": {
        **_COMMON, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
        "max_position_embeddings": 512, "word_embed_proj_dim": 48,
    },
    "gpt_oss": {**_HEAD, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip

#: Families whose attention cannot be replaced.
FOREIGN: dict[str, dict[str, Any]] = {
    "bloom": {**_COMMON, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "gpt_neo": {
        **_COMMON,
        "hidden_size": 48,
        "num_layers": 4,
        "num_heads": 6,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 6,
        "max_position_embeddings": 512,
        "intermediate_size": 64,
    },
    "mpt": {**_COMMON, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 512, "expansion_ratio": 2},
    "falcon": {**_COMMON, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "alibi": False},
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family with weights that are random, large enough that greedy choices are clear, and
    repeatable."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**FAMILIES, **FOREIGN}[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.25)
            elif name.endswith("sinks"):
                weight.normal_(std=1.0)
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False).to(dtype)


def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Plain transformers: batch of one, its own attention and cache."""
    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(out[0, len(prompt) :].tolist())
