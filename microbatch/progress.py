"""Long steps shown on the terminal: a bar where there is one, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from microbatch.executor.progress import Progress

#: A stage of less than this many bytes is over before anyone could read its name.
_WORTH_SHOWING: Final = 16 * 2**20
#: Plain lines come at these shares of a stage.
_PARTS: Final = 4


@contextmanager
def shown_progress(say: Callable[[str], None]) -> Iterator[Progress]:
    """A ``Progress`` that shows itself on stderr: bars if it is a terminal, else a few lines given to ``say``."""
    if not sys.stderr.isatty():
        yield PlainProgress(say)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress as Bars, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in bars.tasks:
                    bars.update(task.id, visible=False)
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=min(done, total))  # type: ignore[arg-type]

        yield report


class PlainProgress:
    """Lines like ``downloading: 46 of 93 MB``, at most ``_PARTS`` a stage and one for a stage without a size."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stage = ""
        self._part = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """One report of a step."""
        if stage != self._stage:
            self._stage, self._part = stage, 0
            if not total:
                self._say(stage)
        if total < _WORTH_SHOWING:
            return
        part = min(done, total) * _PARTS // total
        if part > self._part:
            self._part = part
            self._say(f"{stage}: {min(done, total) / 1e6:.0f} of {total / 1e6:.0f} MB")
