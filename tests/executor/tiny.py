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
_WINDOW = {"sliding_window": 6}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_GPT_OSS = {**_HEAD, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 256,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
_GPT = {**_COMMON, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}
_LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_GROUPED_MOE = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip

#: Family by model_type, with a variant behind a "+": config fields. Windows are short so that every test crosses them.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {**_HEAD, **_WINDOW, "num_hidden_layers": 4, "logit_scale": 0.5},
    "deepseek_v3": {**_LLAMA, **_LATENT, **_GROUPED_MOE},
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "gpt2": _GPT,
    "gpt_neox": {**_LLAMA, "max_position_embeddings": 512},
    "gpt_oss": {**_GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "gpt_oss+yarn": {**_GPT_OSS, "rope_parameters": _YARN},
    "granite": {
        **_LLAMA, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "llama": _LLAMA,
    "mistral": {**_LLAMA, **_WINDOW},
    "mixtral": {**_LLAMA, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": _LLAMA,
    "opt": {
        **_COMMON, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
        "max_position_embeddings": 512, "word_embed_proj_dim": 48,
    },
    "phi": {**_LLAMA, "num_key_value_heads": 6, "partial_rotary_factor": 0.5},
    "phi3": _LLAMA,
    "phi3+window": {**_LLAMA, **_WINDOW},
    "qwen2": _LLAMA,
    "qwen2+window": {**_LLAMA, **_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_MOE},
    "smollm3": {**_LLAMA, **_WINDOW, "use_sliding_window": True, "num_hidden_layers": 4},
    "starcoder2": {**_LLAMA, **_WINDOW},
}  # fmt: skip

#: Families whose attention cannot be replaced, or attends in chunks (llama4), which our backends do not.
FOREIGN: dict[str, dict[str, Any]] = {
    "bloom": {**_COMMON, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "falcon": {**_COMMON, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "alibi": False},
    "gpt_neo": {
        **_COMMON, "hidden_size": 48, "num_layers": 4, "num_heads": 6, "attention_types": [[["global", "local"], 2]],
        "window_size": 6, "max_position_embeddings": 512, "intermediate_size": 64,
    },
    "llama4_text": {
        **_HEAD, "num_hidden_layers": 4, "attention_chunk_size": 8, "num_local_experts": 2,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
    },
    "mpt": {**_COMMON, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 512, "expansion_ratio": 2},
}  # fmt: skip

_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
#: Families whose layers keep more than keys and values.
STATEFUL: dict[str, dict[str, Any]] = {
    "bamba": {**_LLAMA, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_HEAD, **_MAMBA, "mamba_d_ssm": 96},
    "lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {**_COMMON, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "qwen3_next": {
        **_HEAD, **_MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family with weights that are random, large enough that greedy choices are clear, and
    repeatable."""
    torch.manual_seed(11)
    fields = {**FAMILIES, **FOREIGN, **STATEFUL}[family]
    config = AutoConfig.for_model(family.partition("+")[0], **fields)
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
