"""Which tokens end a sequence."""

from __future__ import annotations

from microbatch.core.request import SamplingParams


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence and are not shown."""
    eos = frozenset() if params.ignore_eos else eos_token_ids
    return eos.union(params.stop_token_ids) if params.stop_token_ids else eos
