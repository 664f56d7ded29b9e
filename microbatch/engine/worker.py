"""The one thread that the device works in, and how the event loop hands it work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class WorkerThread:
    """Makes every call in the same thread, one at a time, in order. The thread starts with the first call.

    A queue and a callback take a third of the time of a general thread pool, and libraries that keep something for each
    thread (OpenMP teams, CUDA streams) keep it once. A daemon, so that a program that never closes its engine can end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Hand a call over, in a running event loop; the future is what it returns or raises. Cancelling the future
        does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((loop, future, function, arguments))
        return future

    def end(self) -> None:
        """Let the thread end when it has made the calls that it was given. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job  # what it was given must not live on while the thread waits


def _run(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    result: Any = None
    error: BaseException | None = None
    try:
        result = function(*arguments)
    except StopIteration as stop:  # the one exception that a future does not take
        error = RuntimeError(f"the call raised {stop!r}")
    except BaseException as raised:  # noqa: B902 - raised again where the call is awaited
        error = raised
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        if not loop.is_closed():  # if it is, nobody waits any more
            raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # whoever waited was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
