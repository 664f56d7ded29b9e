"""A GGUF file made into a plain fp32 folder of transformers: slow once, then a load takes a second."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from microbatch.executor.quiet import quiet_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Facts of the loading, not of the model: a plain config is made without them.
_NOT_OF_THE_MODEL = frozenset({"quantization_config", "transformers_version", "_name_or_path"})


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, fp32 safetensors, generation config, tokenizer and chat template of ``gguf`` into ``folder``.

    Takes about half a minute for a model of 135M parameters; the peak is about twice the fp32 weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    with quiet_gguf():
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32, local_files_only=True)
        plain_model(model).save_pretrained(folder)
        del model
        gc.collect()
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without the GGUF quantizer, which would refuse to save it. Weights are shared, not copied."""
    import torch

    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    with torch.device("meta"):
        plain = type(model)(type(model.config)(**config))
    plain.load_state_dict(model.state_dict(), strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
