"""What a model says of itself: how long a sequence may be, and which tokens end it. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from microbatch.errors import SetupError

#: The names configs give to the context length, oldest models last.
_LENGTH_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
#: transformers writes an absurdly large number for "unknown".
_UNKNOWN_LENGTH: Final = 10**9
#: For a model that names no limit (ALiBi and the like): long enough to be of use, short enough to fit.
DEFAULT_LENGTH: Final = 2048


def context_length(config: Any, tokenizer: Any) -> int:
    """The most tokens (prompt and output together) that the model was made for.

    A sliding window is no limit: older tokens are only attended to by fewer layers. With longrope the limit is the
    length it was trained at: beyond that the factors of a whole batch follow its longest row, and answers would depend
    on the company.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        trained = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
        if trained:
            return int(trained)
    if (named := _named_length(text)) is not None:
        return named
    value = getattr(tokenizer, "model_max_length", None)
    return int(value) if value is not None and 0 < value < _UNKNOWN_LENGTH else DEFAULT_LENGTH


def _named_length(config: Any) -> int | None:
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value < _UNKNOWN_LENGTH:
            return value
    return None


def length_in_file(path: Path) -> int | None:
    """The length that a ``config.json`` names; None where it takes transformers to tell.

    The context is never longer than this, but may be shorter (longrope).
    """
    try:
        config = json.loads(path.read_bytes())
        return _named_length(SimpleNamespace(**config.get("text_config", config)))
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # whoever loads it says what is wrong with it


def require_length(max_model_len: int | None, limit: int) -> None:
    """``SetupError`` when a context is asked for that is longer than the model's."""
    if max_model_len is not None and max_model_len > limit:
        raise SetupError(f"max_model_len {max_model_len} is more than the model's context of {limit} tokens")


def end_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The union of the end tokens that the three name: each is incomplete for some model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids: set[int] = set()
    for holder in (generation_config, config, text, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(token_id for token_id in ids if 0 <= token_id < text.vocab_size)
