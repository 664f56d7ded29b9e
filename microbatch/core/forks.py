"""The choices of one request: one of them computes the prompt, the others take its K/V over."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from microbatch.core.sequence import Sequence, SequenceStatus


def find_donor(choices: SequenceABC[Sequence]) -> Sequence | None:
    """A choice that runs and holds the K/V of the whole prompt."""
    return next((c for c in choices if c.prompt_computed), None)


def is_prompt_under_way(choices: SequenceABC[Sequence]) -> bool:
    """Whether a choice that runs is still computing the prompt, so that there will be a donor."""
    return any(c.status is SequenceStatus.RUNNING and not c.prompt_computed for c in choices)


def num_shared_tokens(donor: Sequence, sequence: Sequence) -> int:
    """Tokens whose K/V ``sequence`` can take over: the prompt, but for one token when that is all it has, because
    something must be fed to sample."""
    return min(donor.num_prompt_tokens, sequence.num_tokens - 1)
