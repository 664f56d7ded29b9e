"""How much of a step goes to whom, and how much smaller steps get after the device ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Steps without a fault after which a limit that was halved is doubled again.
_PATIENCE: Final = 64


def share_tokens(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens to feed of each sequence, ``remaining[i]`` at most, ``budget`` in all.

    Decodes (one token remaining) come first, so that a long prompt never holds up running answers; what is left goes to
    prompts in order, the last one in part.
    """
    counts = [0] * len(remaining)
    for decodes in (True, False):
        for index, tokens in enumerate(remaining):
            if (tokens == 1) is decodes:
                counts[index] = min(tokens, budget)
                budget -= counts[index]
    return counts


class StepLimits:
    """Most sequences and tokens of a step. Halved by ``shrink``, given back step by step by ``note_success``."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._full_tokens = max_num_batched_tokens
        self.num_tokens = max_num_batched_tokens
        self.num_rows: int | None = None
        self._successes = 0

    def shrink(self, num_rows: int, num_tokens: int) -> None:
        """A step of this size did not fit: try half of it."""
        self.num_rows = max(1, num_rows // 2)
        self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        self._successes = 0

    def note_success(self) -> None:
        """A step has fitted."""
        if self.num_rows is None and self.num_tokens == self._full_tokens:
            return
        self._successes += 1
        if self._successes >= _PATIENCE:
            self._successes = 0
            self.num_rows = None if self.num_rows is None or self.num_rows > self._full_tokens else self.num_rows * 2
            self.num_tokens = min(self._full_tokens, self.num_tokens * 2)

    def room(self, num_running: int) -> int | None:
        """Sequences that may join ``num_running``; None for any number."""
        return None if self.num_rows is None else max(0, self.num_rows - num_running)
