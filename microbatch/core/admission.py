"""The way in: from the waiting queue to blocks and a share of the step's tokens."""

from __future__ import annotations

from collections.abc import Iterable

from microbatch.core.forks import find_donor, is_prompt_under_way
from microbatch.core.queue import WaitingQueue
from microbatch.core.requests import RequestTable
from microbatch.core.residents import Residents
from microbatch.core.sequence import Sequence


class Admission:
    """Lets sequences in, in the order that the policy wants, as far as blocks and tokens reach."""

    def __init__(self, waiting: WaitingQueue, residents: Residents, requests: RequestTable) -> None:
        self._waiting = waiting
        self._residents = residents
        self._requests = requests

    def admit(
        self, wanted: Iterable[int], budget: int | None, now: float
    ) -> tuple[tuple[Sequence, ...], Sequence | None]:
        """Those that came in, and the one that found too few blocks, if any; nobody goes past it.

        ``budget``: tokens that the step may still feed. None for a batch that runs to completion: it feeds all tokens.
        """
        admitted: list[Sequence] = []
        stuck: Sequence | None = None
        for seq_id in wanted:
            if budget is not None and budget <= 0:
                break
            sequence = self._waiting.get(seq_id)
            donor = None if budget is None else self._donor(sequence)
            if donor is None and budget is not None and self._waits(sequence):
                continue
            if not self._residents.begin(sequence, donor, now):
                stuck = sequence
                break
            self._waiting.remove(sequence)
            count = sequence.num_tokens - sequence.num_computed_tokens
            if budget is not None:
                count = min(count, budget)
                budget -= count
            sequence.num_scheduled_tokens = count
            admitted.append(sequence)
        if admitted:
            self._requests.note_started()
        return tuple(admitted), stuck

    def _donor(self, sequence: Sequence) -> Sequence | None:
        if sequence.params.n == 1 or sequence.num_swapped_tokens or sequence.scores_prompt:
            return None
        return find_donor(self._requests.choices(sequence))

    def _waits(self, sequence: Sequence) -> bool:
        """The choices of a request share the K/V of their prompt: while one computes it, the others wait, unless it is
        so short that they are faster by themselves."""
        if sequence.params.n == 1 or sequence.num_swapped_tokens:
            return False
        choices = self._requests.choices(sequence)
        if choices[0].scores_prompt and not choices[0].finished:
            return sequence.index > 0  # what is told of the prompt comes before any answer to it
        if sequence.num_prompt_tokens <= self._residents.block_size:
            return False
        return is_prompt_under_way(choices)
