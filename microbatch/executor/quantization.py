"""Weights in 8 or 4 bits by bitsandbytes, and whether the weights fit: all of it settled before anything is loaded."""

from __future__ import annotations

from typing import Any, Final

import torch

from microbatch.errors import SetupError
from microbatch.executor.packages import require_quantization
from microbatch.executor.quiet import first_line, quiet_import, quiet_transformers

#: Bytes a weight takes; a quantized model keeps embeddings and norms in the compute format, so these are rounded up.
_BYTES: Final = {"int8": 1.2, "int4": 0.8}
#: The share of the free memory that weights may take; the rest is for activations and K/V.
_SHARE: Final = 0.9


def available_bytes(device: torch.device) -> int:
    """Free memory of the device in bytes."""
    from accelerate.utils import get_max_memory

    memory: dict[int | str, int] = get_max_memory()
    if device.type == "cuda":
        return int(memory.get(device.index or 0, 0))
    return int(memory.get("cpu", max(memory.values())))  # no "cpu" where GPU and host share their memory


def count_parameters(config: Any) -> int:
    """How many weights a model of ``config`` has; built on the meta device, so it takes no memory."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with quiet_transformers(), torch.device("meta"):
        model = factory.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def choose_quantization(name: str, config: Any, dtype: torch.dtype, device: torch.device) -> tuple[str, int]:
    """The form to load in (``none``, ``int8``, ``int4``) and the bytes it may take on the device.

    ``auto``: none while the weights fit, else int8, else int4; on a CPU none. ``SetupError`` when the chosen form does
    not fit, because spilling weights to disk or host memory would make every step crawl.
    """
    if name not in ("none", "int8", "int4", "auto"):
        raise SetupError(f"quantization must be none, int8, int4 or auto, not {name!r}")
    own = getattr(config, "quantization_config", None)
    if own is not None:
        return _already_quantized(name, own, device)
    parameters, room = count_parameters(config), int(available_bytes(device) * _SHARE)
    sizes = {"none": parameters * dtype.itemsize, **{form: int(parameters * size) for form, size in _BYTES.items()}}
    forms = ["none", "int8", "int4"] if name == "auto" and device.type == "cuda" else [name.replace("auto", "none")]
    for form in forms:
        if sizes[form] <= room:
            require_quantization(form)
            return form, room
    raise SetupError(_does_not_fit(forms[-1], sizes, room, device))


def quantization_config(form: str, dtype: torch.dtype) -> Any:
    """What transformers wants for ``form`` (``none``: nothing). 4-bit is NF4, computed in ``dtype``."""
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    if form == "none":
        return None
    if form == "int8":
        return make(load_in_8bit=True)
    return make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def require_bitsandbytes(form: str, device: torch.device) -> None:
    """``SetupError`` when bitsandbytes is there but does not work on this device; imports it."""
    if form == "none":
        return
    try:
        with quiet_import("bitsandbytes"):
            import bitsandbytes
    except Exception as error:  # a broken build raises whatever its native library raised
        raise SetupError(f"bitsandbytes cannot be imported ({first_line(error)}): reinstall it") from error
    supported = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in supported:
        raise SetupError(
            f"quantization {form} does not work on {device.type} with bitsandbytes {bitsandbytes.__version__}: "
            "pip install -U bitsandbytes, or use --quantization none"
        )


def _already_quantized(name: str, own: Any, device: torch.device) -> tuple[str, int]:
    method = own.get("quant_method", "unknown") if isinstance(own, dict) else getattr(own, "quant_method", "unknown")
    method = str(getattr(method, "value", method))
    if name in ("int8", "int4"):
        raise SetupError(f"this model comes quantized already ({method}): leave --quantization out")
    return "none", int(available_bytes(device) * _SHARE)


def _does_not_fit(form: str, sizes: dict[str, int], room: int, device: torch.device) -> str:
    smaller = [other for other in ("int8", "int4") if sizes[other] < sizes[form] and sizes[other] <= room]
    advice = f"use --quantization {smaller[0]}, or a smaller model" if smaller else "use a smaller model"
    needed, quantized = f"{sizes[form] / 1e9:.2g} GB", "" if form == "none" else f" in {form}"
    return f"the weights need {needed}{quantized} and {device.type} has {room / 1e9:.2g} GB for them: {advice}"
