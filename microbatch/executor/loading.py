"""A name and a few wishes made into a model on its device. What can be refused is refused before the load."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from microbatch.errors import SetupError
from microbatch.executor.embedded import default_home
from microbatch.executor.limits import context_length, end_token_ids, require_length
from microbatch.executor.precision import choose_device, choose_dtype
from microbatch.executor.progress import Progress, silent
from microbatch.executor.quantization import choose_quantization, quantization_config, require_bitsandbytes
from microbatch.executor.quiet import first_line, quiet_gguf, quiet_transformers, silence_cast_noise
from microbatch.executor.sources import ModelFiles, check_quantization, fetch, find_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load. ``model``: "" or None for the embedded one, a folder, a GGUF file, a hub name.

    ``dtype``: auto, float32, float16, bfloat16. ``quantization``: none, int8, int4, auto. ``device``: auto, cpu, cuda.
    ``local_files_only``: never use the network. ``max_model_len``: a context that the model must have. Code that comes
    with a model is never run.
    """

    model: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    local_files_only: bool = False
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, without gradients, whole on ``device``. Do not call ``.to()`` on a quantized one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    name: str
    folder: Path
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    quantization: str = "none"


def load_model(spec: ModelSpec, *, home: Path | None = None, progress: Progress = silent) -> LoadedModel:
    """Load what ``spec`` names, downloading it first if need be. ``SetupError``: one line with what, why, what to do.

    ``home``: where the embedded model lives (``default_home()``).
    """
    device = choose_device(spec.device)
    source = find_source(spec.model)
    check_quantization(source, spec.quantization)
    files = fetch(source, home or default_home(), progress, local_files_only=spec.local_files_only)
    with quiet_transformers() if files.gguf_file is None else quiet_gguf():
        config = _load_config(files)
        dtype = choose_dtype(spec.dtype, _configured_dtype(config), device)
        tokenizer = _load_tokenizer(files)
        limit = context_length(config, tokenizer)
        require_length(spec.max_model_len, limit)
        if files.gguf_file is not None:
            model, form = _load_gguf(files, dtype, device), "none"
        else:
            model, form = _load_folder(files, config, dtype, device, spec.quantization)
    _freeze(model)
    if form != "none":
        _try_one_token(model, files, form)
    ends = end_token_ids(model.generation_config, model.config, tokenizer)
    logger.info("loaded %s: %s, %s, quantization %s, context %d", files.name, device, dtype, form, limit)
    return LoadedModel(model, tokenizer, files.name, files.folder, limit, ends, dtype, device, form)


def _freeze(model: Any) -> None:
    model.eval().requires_grad_(False)


def _try_one_token(model: PreTrainedModel, files: ModelFiles, form: str) -> None:
    """Quantized kernels refuse some shapes only when they run: better now than in the first request."""
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device)).logits
        sound = bool(torch.isfinite(logits).all())
    except Exception as error:
        raise SetupError(
            f"model {files.name!r} does not run in {form} on {model.device.type} "
            f"({type(error).__name__}: {first_line(error)}): use --quantization none"
        ) from error
    if not sound:
        raise SetupError(f"model {files.name!r} computes no numbers in {form}: use --quantization none")


def _load_config(files: ModelFiles) -> Any:
    """The config, if it is one of a text model that generates from left to right."""
    try:
        config = AutoConfig.from_pretrained(files.folder, **_common(files))
    except Exception as error:
        raise _refused("its config", files, error) from error
    _require_causal(config, files)
    return config


def _require_causal(config: Any, files: ModelFiles) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    names = {known} if isinstance(known, str) else set(known or ())
    made_for = set(getattr(config, "architectures", None) or names)
    if not names or getattr(config, "is_encoder_decoder", False) or not made_for & names:
        kind = ", ".join(sorted(made_for)) or config.model_type
        raise SetupError(f"model {files.name!r} ({kind}) is not a causal language model: microbatch serves only those")


def _load_folder(
    files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device, quantization: str
) -> tuple[PreTrainedModel, str]:
    form, room = choose_quantization(quantization, config, dtype, device)
    require_bitsandbytes(form, device)
    if form == "int8":
        silence_cast_noise()
    where: int | str = "cpu" if device.type == "cpu" else (device.index or 0)
    factory: Any = AutoModelForCausalLM
    try:
        model, report = factory.from_pretrained(
            files.folder,
            config=config,
            dtype=dtype,
            device_map="auto",
            max_memory={where: room},
            quantization_config=quantization_config(form, dtype),
            output_loading_info=True,
            **_common(files),
        )
    except Exception as error:
        raise _refused("its weights", files, error) from error
    _require_whole(model, report["missing_keys"], files)
    return model, form


def _load_gguf(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A GGUF file, its weights made full size again: they are quantized in a way that only llama.cpp computes with."""
    logger.info("reading %s: slow for a GGUF file, a folder of safetensors loads much faster", files.gguf_file)
    try:
        factory: Any = AutoModelForCausalLM
        model: Any = factory.from_pretrained(files.folder, dtype=dtype, **_common(files))
        return cast(PreTrainedModel, model.to(device))
    except Exception as error:
        raise _refused("its weights", files, error) from error


def _load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.folder, **_common(files))
    except Exception as error:
        raise _refused("its tokenizer", files, error) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SetupError(f"model {files.name!r} has no fast tokenizer (tokenizer.json): convert it with transformers")
    return tokenizer


def _common(files: ModelFiles) -> dict[str, Any]:
    arguments: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    return arguments if files.gguf_file is None else {**arguments, "gguf_file": files.gguf_file}


def _configured_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)


def _require_whole(model: PreTrainedModel, missing_keys: set[str], files: ModelFiles) -> None:
    """No weight made up at random, none left on the disk or in host memory."""
    if missing_keys:
        some = ", ".join(sorted(missing_keys)[:3])
        raise SetupError(
            f"model {files.name!r} in {files.folder} lacks {len(missing_keys)} weights ({some}): get it again"
        )
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 or "disk" in places:
        raise SetupError(
            f"model {files.name!r} does not fit on one device (it would be spread over {', '.join(sorted(places))}): "
            "use --quantization int8 or int4, or a smaller model"
        )


def _refused(what: str, files: ModelFiles, error: Exception) -> SetupError:
    """One line for whatever transformers, torch or safetensors raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return SetupError(f"no memory on the GPU for model {files.name!r}: use --quantization int8 or int4")
    if "dispatched on the CPU or the disk" in str(error):
        return SetupError(
            f"model {files.name!r} does not fit on the device: use --quantization int4, or a smaller model"
        )
    if "trust_remote_code" in str(error):
        return SetupError(
            f"model {files.name!r} needs code of its own, which microbatch does not run: take another one"
        )
    reason = f"{type(error).__name__}: {first_line(error)}"
    return SetupError(f"cannot load model {files.name!r} from {files.folder}: {what} failed ({reason})")
