"""One uniform number for a token: a pure function of the sequence's seed and the token's position.

Neither the batch nor the order of rows enters, so a seeded request gives the same text whatever runs beside it and also
after a preemption. The mixing function is SplitMix64's finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014), applied to the seed and again with the position.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Draws:
    """The numbers of one seed, in [0, 1) with 53 random bits, by position."""

    __slots__ = ("_mixed",)

    def __init__(self, seed: int) -> None:
        self._mixed = _mix(seed & _MASK)

    def at(self, position: int) -> float:
        """The number for the token at ``position``."""
        return (_mix((self._mixed + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def uniform(seed: int, position: int) -> float:
    """The number of one seed and one position."""
    return Draws(seed).at(position)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
