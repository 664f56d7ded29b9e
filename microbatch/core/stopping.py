"""When a sequence ends by its own tokens."""

from __future__ import annotations

from collections.abc import Collection

from microbatch.core.request import FinishReason
from microbatch.core.sequence import Sequence


def is_end_token(sequence: Sequence, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """Whether ``token_id``, just sampled, ends the sequence and is not shown."""
    params = sequence.params
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)


def finish_reason(sequence: Sequence, eos_token_ids: Collection[int]) -> FinishReason | None:
    """Why the sequence ends after its newest token, or None.

    An end token counts as ``stop`` also when it is the last token that the limits allow.
    """
    if is_end_token(sequence, sequence.output_token_ids[-1], eos_token_ids):
        return FinishReason.STOP
    if sequence.num_tokens >= sequence.max_total_tokens:
        return FinishReason.LENGTH
    return None
