"""How much of something a client may still have: so much a minute, and at most a minute's worth at once."""

from __future__ import annotations

import math
from typing import Final

_MINUTE_S: Final = 60.0


class TokenBucket:
    """``per_minute`` units flow in evenly up to ``per_minute``; ``now`` is in seconds on any clock that only rises.

    Raises ``ValueError`` unless ``per_minute`` is at least 1.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        if per_minute < 1:
            raise ValueError(f"per_minute must be at least 1, not {per_minute}")
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._seen = now

    def wait(self, amount: int, now: float) -> float:
        """Seconds until ``amount`` can be taken, 0 if now. An amount over the capacity can be taken from a full bucket,
        which is in debt then: what is allowed at all must not wait for ever."""
        self._flow(now)
        missing = min(float(amount), self._capacity) - self._level
        return max(0.0, missing * _MINUTE_S / self._capacity)

    def take(self, amount: int) -> None:
        """Take it, whatever is there."""
        self._level -= amount

    def give_back(self, amount: int) -> None:
        """Part of what was taken was not used."""
        self._level = min(self._capacity, self._level + amount)

    def is_full(self, now: float) -> bool:
        """Whether nothing is missing, so that a new bucket would be the same."""
        self._flow(now)
        return math.isclose(self._level, self._capacity)

    def _flow(self, now: float) -> None:
        passed, self._seen = max(0.0, now - self._seen), max(now, self._seen)
        self._level = min(self._capacity, self._level + passed * self._capacity / _MINUTE_S)
