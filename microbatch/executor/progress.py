"""How a long step (download, conversion) tells how far it is, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, and at least once at the end of a stage with ``done == total``.

    ``stage`` is a few words for people. ``done`` and ``total`` are bytes; both are 0 when there is nothing to count.
    """

    def __call__(self, stage: str, done: int, total: int) -> None:
        """One report; must be quick and must not raise."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Tell nobody: the default of the library."""
