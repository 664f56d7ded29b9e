"""From a sequence to its part of a plan."""

from __future__ import annotations

from microbatch.core.plan import Admitted, SequenceStep
from microbatch.core.sequence import Sequence


def sequence_step(sequence: Sequence, block_ids: tuple[int, ...], count: int) -> SequenceStep:
    """Feed the next ``count`` tokens, and sample one token when they reach the end."""
    start = sequence.num_computed_tokens
    samples = start + count == sequence.num_tokens
    if sequence.output_token_ids and samples and count == 1:
        token_ids: tuple[int, ...] = (sequence.output_token_ids[-1],)  # the common case, without copying the rest
    else:
        token_ids = sequence.token_ids()[start : start + count]
    return SequenceStep(sequence.seq_id, token_ids, start, block_ids, samples, sequence.params)


def admission(sequence: Sequence) -> Admitted:
    """What the executor must know of a sequence that enters."""
    output = tuple(sequence.output_token_ids)
    return Admitted(sequence.seq_id, sequence.request.prompt_token_ids, output, sequence.seed)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``: choice 0 keeps the request's, so that n = 1 and the first of n agree; the others
    are spread by an odd constant."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64
