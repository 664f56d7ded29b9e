"""Work for a client that may leave: it ends with the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, which is cancelled at once when the client leaves; then raises ``ClientGone``.

    To be called when the body has been read: what ``receive`` gives is looked at for a disconnect only.
    """
    results: list[T] = []
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def run() -> None:
            try:
                results.append(await work())
            except Exception as error:  # kept, since leaving a task group would wrap it in a group
                errors.append(error)
            group.cancel_scope.cancel()

        # The work has the new task: it wakes for every token, and each time all calls around it would be gone through.
        group.start_soon(run)
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGone
    return results[0]


async def gather(works: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """All results in order. The first error cancels the others and is raised as it is."""
    if len(works) == 1:
        return [await works[0]()]
    results: dict[int, T] = {}
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def run(index: int, work: Callable[[], Awaitable[T]]) -> None:
            try:
                results[index] = await work()
            except Exception as error:  # kept, since leaving a task group would wrap it in a group
                errors.append(error)
                group.cancel_scope.cancel()

        for index, work in enumerate(works):
            group.start_soon(run, index, work)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(works))]
