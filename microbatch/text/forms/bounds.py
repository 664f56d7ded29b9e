"""What a schema may cost: it comes from a stranger, and the library bounds the size of what it makes, not the time.

Each bound was found by measurement: below it any schema is compiled or refused within about a second, far above it a
line of JSON takes minutes and gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from microbatch.errors import InvalidRequestError

MAX_DEPTH: Final = 64
#: Patterns that one text must match at the same time. The time to find out whether any text does doubles with each.
MAX_COMBINED: Final = 10
#: Places, in all of a schema, where constraints meet: each element of an allOf but the first, a $ref beside others.
MAX_JOINTS: Final = 200
#: Names in patternProperties, in all of a schema: each pair must be shown to be disjoint, again at each joint.
MAX_PATTERN_NAMES: Final = 40
#: A number is told to be a multiple by an automaton of so many states. Of 0.01 it is 1, of 2.5 it is 25.
MAX_MULTIPLE: Final = 10_000
_PATTERNS: Final = ("pattern", "format")
_COMBINED: Final = ("$ref", "anyOf", "oneOf")


def check_bounds(schema: object) -> None:
    """Raise ``InvalidRequestError`` when a schema costs too much to compile."""
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    census = _Census()
    for part in _objects(schema):
        census.count(part)
    if problem := census.problem():
        raise InvalidRequestError(f"the schema {problem}")


@dataclass(slots=True)
class _Census:
    """What the parts of a schema hold. Keywords are counted wherever they stand: in a name or a constant too."""

    patterns: set[str] = field(default_factory=set)
    multiples: set[int] = field(default_factory=set)
    names: int = 0
    joints: int = 0

    def count(self, part: dict[str, Any]) -> None:
        own = [part[name] for name in _PATTERNS if isinstance(part.get(name), str)]
        multiple, both, by_pattern = (part.get(name) for name in ("multipleOf", "allOf", "patternProperties"))
        self.patterns.update(own)
        if isinstance(multiple, int) or (isinstance(multiple, float) and math.isfinite(multiple)):
            self.multiples.add(_states(multiple))
        self.names += len(by_pattern) if isinstance(by_pattern, dict) else 0
        ways = len(own) + (multiple is not None) + sum(name in part for name in _COMBINED)
        self.joints += max(0, ways + (len(both) if isinstance(both, list) else 0) - 1)

    def problem(self) -> str:
        """What there is too much of, or ""."""
        # n patterns in one place need n - 1 joints, wherever in the schema these are.
        if min(len(self.patterns), self.joints + 1) > MAX_COMBINED:
            return f"combines more than {MAX_COMBINED} patterns by allOf, anyOf or $ref"
        if self.joints > MAX_JOINTS:
            return f"has more than {MAX_JOINTS} parts to combine in allOf and beside $ref"
        if self.names > MAX_PATTERN_NAMES:
            return f"has more than {MAX_PATTERN_NAMES} names in patternProperties"
        if (math.lcm(*self.multiples) if self.joints else max(self.multiples, default=1)) > MAX_MULTIPLE:
            return f"has a multipleOf of more than {MAX_MULTIPLE}, decimal point left out"
        return ""


def _states(multiple: float) -> int:
    """The number without its decimal point."""
    _, digits, exponent = Decimal(str(abs(multiple))).normalize().as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    return max(1, whole * int(10 ** max(0, exponent)))


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Every object in a value, itself included."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            yield item
        rest.extend(_inner(item))


def _depth(value: object) -> int:
    """How deep lists and objects are nested; the reader of JSON has its own, larger bound."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for outer in level for inner in _inner(outer) if isinstance(inner, (dict, list))]
    return depth


def _inner(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
