"""What a model says of itself: how long a sequence may be, and which tokens end it."""

from __future__ import annotations

from typing import Any, Final

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
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and 0 < value < _UNKNOWN_LENGTH:
            return value
    value = getattr(tokenizer, "model_max_length", None)
    return int(value) if value is not None and 0 < value < _UNKNOWN_LENGTH else DEFAULT_LENGTH


def end_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The union of the end tokens that the three name: each is incomplete for some model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids: set[int] = set()
    for holder in (generation_config, config, text, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(token_id for token_id in ids if 0 <= token_id < text.vocab_size)
