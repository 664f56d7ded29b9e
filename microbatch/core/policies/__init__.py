"""The policies that come with microbatch, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Final

from microbatch.core.policies.continuous import ContinuousPolicy
from microbatch.core.policies.serial import SerialPolicy
from microbatch.core.policies.window import WindowPolicy
from microbatch.core.policy import Policy, PolicyFactory
from microbatch.errors import SetupError

__all__ = ["POLICIES", "ContinuousPolicy", "SerialPolicy", "WindowPolicy", "make_policy"]

POLICIES: Final[Mapping[str, PolicyFactory]] = {
    ContinuousPolicy.name: ContinuousPolicy,
    SerialPolicy.name: SerialPolicy,
    WindowPolicy.name: WindowPolicy,
}


def make_policy(name: str, arguments: Mapping[str, float | int | str]) -> Policy:
    """Build a policy by name; an unknown name or argument raises ``SetupError`` with the known ones."""
    if name not in POLICIES:
        raise SetupError(f"unknown policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    known = inspect.signature(POLICIES[name]).parameters
    for argument in arguments:
        if argument not in known:
            takes = ", ".join(known) or "none"
            raise SetupError(f"policy {name!r} has no argument {argument!r}; it takes: {takes}")
    return POLICIES[name](**arguments)
