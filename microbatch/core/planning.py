"""From a sequence to its part of a plan."""

from __future__ import annotations

from microbatch.core.plan import Admitted, SequenceStep
from microbatch.core.sequence import Sequence


def sequence_step(sequence: Sequence) -> SequenceStep:
    """Feed what is scheduled of the sequence, and sample one token when that reaches the end."""
    tokens, start = sequence.token_ids, sequence.num_computed_tokens
    end = start + sequence.num_scheduled_tokens
    fed = (tokens[start],) if end == start + 1 else tuple(tokens[start:end])
    samples = end == len(tokens) and not sequence.prompt_only
    return SequenceStep(sequence.seq_id, fed, start, sequence.block_ids, samples, sequence.params)


def admission(sequence: Sequence) -> Admitted:
    """What the executor must know of a sequence that enters."""
    output = tuple(sequence.output_token_ids)
    prompt = sequence.request.prompt_token_ids
    return Admitted(sequence.seq_id, prompt, output, sequence.seed, sequence.scores_prompt)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``: choice 0 keeps the request's, so that n = 1 and the first of n agree; the others
    are spread by an odd constant."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64
