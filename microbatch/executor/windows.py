"""Do the attention calls of a model carry the windows that its config promises?

The probe's rows are shorter than any real window, so logits alone cannot tell a model that hands its window to our
attention function from one that hides it in a mask, which we never see.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch


def window_problem(model: Any, seen: Sequence[int | None]) -> str | None:
    """What is wrong with the windows of a forward's attention calls, one a layer, or None."""
    promises = promised_windows(model.config, len(seen), knows_windows(model))
    for layer, (promised, window) in enumerate(zip(promises, seen)):
        if promised is None:
            return f"layer {layer} attends in a way of its own"
        if promised is not (window is not None):
            return f"layer {layer} {'hides its' if promised else 'has an unannounced'} window"
    return None


def promised_windows(config: Any, num_layers: int, knows: bool) -> list[bool | None]:
    """Whether each layer attends in a window, by the config. None: to something that is no window (chunks).

    ``knows``: the code of the model knows windows. Where it does not, a config may still name one, to no effect.
    """
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types:
        kinds = {"full_attention": False, "sliding_attention": knows}
        return [kinds.get(name) for name in types]
    if getattr(text, "attention_chunk_size", None):
        return [None] * num_layers
    windowed = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    return [windowed and knows] * num_layers


def knows_windows(model: torch.nn.Module) -> bool:
    """Whether the source of the model says a word of sliding windows; so it is held to be where there is no source."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("torch."):
            continue
        try:
            if "sliding" in inspect.getsource(sys.modules[name]):
                return True
        except (KeyError, OSError, TypeError):
            return True
    return False
