"""Who runs, and when: what a policy sees, what it answers, and the table of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A waiting sequence as a policy sees it, in arrival order. ``urgent``: waiting for company is useless."""

    seq_id: int
    arrival_time: float
    num_tokens: int
    priority: int = 0
    client: str = ""
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The state a policy decides on. ``draining``: nothing new will arrive, so waiting for company is useless."""

    waiting: tuple[WaitingView, ...]
    num_running: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """``admit`` in this order (the scheduler may cut the tail for memory), or ask again at ``wake_at``.

    ``reason`` says why a batch closes: size, window, idle or drain.
    """

    admit: tuple[int, ...] = ()
    wake_at: float | None = None
    reason: str = ""


@runtime_checkable
class Policy(Protocol):
    """A policy is a pure function of a view and the time.

    ``run_to_completion``: a batch closes once, runs to its end and nothing joins it; the scheduler asks ``decide`` only
    when nothing runs. Otherwise it asks before every step.
    """

    name: ClassVar[str]
    run_to_completion: ClassVar[bool]

    def decide(self, view: SchedulerView, now: float) -> Decision:
        """Whom to admit at ``now`` (seconds), or when to ask again. Must not keep state between calls."""
        ...

    def parameters(self) -> Mapping[str, float | int | str]:
        """The policy's parameters by name, for ``GET /v1/policy`` and logs."""
        ...


#: A policy is made from the two settings that most need; each takes what it uses.
PolicyFactory = Callable[..., Policy]
