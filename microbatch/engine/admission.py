"""What a request must be to be accepted, beyond what its parameters say by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch.core.request import SamplingParams
from microbatch.engine.parts import EngineParts
from microbatch.errors import ContextLengthError, InvalidRequestError


def check_prompt(parts: EngineParts, token_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise ``InvalidRequestError`` for tokens outside the vocabulary, ``ContextLengthError`` for a prompt that leaves
    no room."""
    vocab_size = parts.tokenizer.vocab_size
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    if not all(isinstance(i, int) for i in token_ids):
        raise InvalidRequestError("token ids must be whole numbers", param="prompt")
    if len(token_ids) + (params.max_tokens != 0) > parts.max_model_len:
        parts.loop.core.observers.request_rejected("context_length")
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens; the context of {parts.max_model_len} tokens must hold it"
            + (" and at least one more" if params.max_tokens != 0 else ""),
            param="prompt",
        )
    for name, ids in (
        ("prompt", token_ids),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequestError(
                f"token id {bad} in {name} is outside the vocabulary (0 to {vocab_size - 1})", param=name
            )
