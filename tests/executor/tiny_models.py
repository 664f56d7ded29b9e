"""Tiny random models with a tokenizer, made on the spot: as a folder of transformers and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: The bytes and one merge (GGUF cannot do without), then two special tokens.
MERGE, BOS, EOS, VOCAB_SIZE = 256, 257, 258, 259


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, in GPT-2's alphabet of bytes, and "ab" as the only longer one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"ab": MERGE, "<bos>": BOS, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    return made


def llama_config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**sizes, **changes})


def save_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random model and its tokenizer in ``folder``."""
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    model: LlamaForCausalLM = make(llama_config(**changes))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    record = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}), encoding="utf-8")


def save_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """``model`` with the byte tokenizer as an fp32 GGUF file."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types([1] * BOS + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_gguf_tensor(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_tensor(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, Any]:
    """llama.cpp's name and layout: it interleaves the halves of each rotary head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is not None:
        rows, columns = tensor.shape
        tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk."), tensor.float().contiguous().numpy()
