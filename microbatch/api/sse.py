"""Server-sent events: a response that is sent while it is made."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microbatch.api.disconnect import ClientGone, while_connected
from microbatch.api.errors import as_microbatch_error, error_body, error_response
from microbatch.errors import MicrobatchError

logger = logging.getLogger("microbatch.api")

#: Gives one event out; ``content`` becomes its JSON.
Emit = Callable[[object], Awaitable[None]]

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Runs ``produce(emit)`` and sends its events, then ``data: [DONE]``.

    The status line goes out with the first event, so an error before it is still a response of its own status; an error
    after it is one event ``{"error": ...}``. A client that leaves cancels ``produce``.
    """

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        super().__init__(media_type="text/event-stream")
        self._produce = produce
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            error = await while_connected(receive, lambda: self._run(send))
        except ClientGone:
            return
        if error is not None:
            await error_response(error)(scope, receive, send)

    async def _run(self, send: Send) -> MicrobatchError | None:
        """Send the stream; an error that came before anything was sent is returned."""
        order = anyio.Lock()  # several choices may have news at once, the status line goes first

        async def emit(content: object) -> None:
            async with order:
                await self._send(send, b"data: " + msgspec.json.encode(content) + b"\n\n")

        try:
            await self._produce(emit)
        except OSError as error:  # how a server says that the connection is closed
            raise ClientGone from error
        except Exception as error:
            if not isinstance(error, MicrobatchError):
                logger.exception("unexpected error in a stream")
            if not self._started:
                return as_microbatch_error(error)
            await emit(error_body(as_microbatch_error(error)))
        await self._send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": True})
