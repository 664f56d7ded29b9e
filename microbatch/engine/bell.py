"""What wakes the one reader of a stream, or of several at once."""

from __future__ import annotations

import asyncio


class Bell:
    """``ring`` lets the task that is in ``wait`` run; rung while nobody waits, it is not remembered.

    A reader looks whether there is news, and waits if there is none, without giving way in between: so it misses none.
    """

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the reader. However often it is rung before the reader runs, it runs once."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next ``ring``."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
