"""When a sequence ends by its own tokens."""

from __future__ import annotations

from collections.abc import Collection

from microbatch.core.request import FinishReason
from microbatch.core.sequence import Sequence


def is_end_token(sequence: Sequence, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """Whether ``token_id``, just sampled, ends the sequence and is not shown."""
    params = sequence.params
    return token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)


def finish_reason(sequence: Sequence, ended: bool) -> FinishReason | None:
    """Why the sequence ends after its newest token, or None; ``ended``: it is an end token.

    An end token counts as ``stop`` also when it is the last token that the limits allow.
    """
    if ended:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_total_tokens else None
