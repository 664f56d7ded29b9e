"""The sending end of one event stream: events, heartbeats while there are none, and a limit to how long it waits."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import msgspec
from starlette.types import Scope, Send

from microbatch.api.request_id import SEND_BODY
from microbatch.engine.bell import Bell

logger = logging.getLogger("microbatch.api")

#: A comment, which every reader of event streams leaves out.
PING: Final = b": ping\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx, and others after it, would keep events back until they have enough
]


_encode = msgspec.json.Encoder().encode


def _ignore(reason: str) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """``heartbeat_s`` seconds without an event bring a comment, so that proxies keep the connection open; 0: never.

    A reader is dropped when the connection takes nothing for ``send_timeout_s`` seconds (0: no limit), or when more
    than ``max_unread_tokens`` of a choice wait for it. ``dropped`` is told why: ``timeout`` or ``unread``.
    """

    heartbeat_s: float = 15.0
    send_timeout_s: float = 30.0
    max_unread_tokens: int = 4096
    dropped: Callable[[str], None] = _ignore


class EventSender:
    """One task sends; ``bell`` wakes it. ``cancel`` must end that task's work: called when the reader is dropped.

    One timer watches both silence and a send that does not come back. It looks when one of them may be due, so an event
    costs it a note of the time and no timer of its own.
    """

    def __init__(self, scope: Scope, send: Send, rules: StreamRules, cancel: Callable[[], None]) -> None:
        self.bell = Bell()
        self.rules = rules
        self.started = False
        self._send_start = send
        self._send_body: Send = scope.get("state", {}).get(SEND_BODY, send)
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = self._loop.time()
        self._sending = False
        self._ping_due = False
        self._is_dropped = False

    async def events(self, contents: Iterable[object]) -> None:
        """Send an event for each content, as JSON, all in one piece."""
        await self._send(b"".join([b"data: %b\n\n" % _encode(content) for content in contents]))

    async def news(self) -> None:
        """Until ``bell`` rings; sends the heartbeats that are due meanwhile."""
        await self.bell.wait()
        if self._ping_due:
            self._ping_due = False
            await self._send(PING)

    async def end(self) -> None:
        """The last event."""
        await self._send(b"data: [DONE]\n\n", more=False)

    def overrun(self) -> None:
        """Too much is unread."""
        self._drop("unread")

    def __enter__(self) -> EventSender:
        self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _send(self, data: bytes, more: bool = True) -> None:
        self._sending, self._sent_at = True, self._loop.time()
        if not self.started:
            self.started = True
            await self._send_start({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send_body({"type": "http.response.body", "body": data, "more_body": more})
        self._sending = False

    def _watch(self) -> None:
        """Act on what is due and look again when something may be."""
        now, rules = self._loop.time(), self.rules
        limit, beat = rules.send_timeout_s or math.inf, rules.heartbeat_s or math.inf
        if self._sending and now >= self._sent_at + limit:
            self._drop("timeout")
            return
        if not self._sending and now >= self._sent_at + beat:
            self._ping_due, self._sent_at = True, now
            self.bell.ring()
        due = self._sent_at + (limit if self._sending else min(limit, beat))
        if due < math.inf:
            self._timer = self._loop.call_at(max(due, now + _LEAST_S), self._watch)

    def _drop(self, reason: str) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            logger.warning("a client that does not read was dropped: %s", reason)
            self.rules.dropped(reason)
            self._cancel()


#: The timer never looks more often than this.
_LEAST_S: Final = 0.001
