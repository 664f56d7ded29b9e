"""Server-sent events: a response that is sent while it is made."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microbatch.api.disconnect import ClientGone, while_connected
from microbatch.api.errors import as_microbatch_error, error_body, error_response
from microbatch.api.event_sender import EventSender, StreamRules
from microbatch.errors import MicrobatchError

logger = logging.getLogger("microbatch.api")

#: Where a server that can do it puts a call that closes the connection without sending what is left.
ABORT_CONNECTION: Final = "abort_connection"


class EventStream(Response):
    """Runs ``produce(sender)`` and sends its events, then ``data: [DONE]``.

    The status line goes out with the first event or heartbeat, so an error before it is still a response of its own
    status; an error after it is one event ``{"error": ...}``. A client that leaves, or does not read, cancels
    ``produce``.
    """

    def __init__(self, produce: Callable[[EventSender], Awaitable[None]], rules: StreamRules = StreamRules()) -> None:
        super().__init__(media_type="text/event-stream")
        self._produce = produce
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            error = await while_connected(receive, lambda: self._run(scope, send))
        except ClientGone:
            return
        if error is not None:
            await error_response(error)(scope, receive, send)

    async def _run(self, scope: Scope, send: Send) -> MicrobatchError | None:
        """Send the stream; an error that came before anything was sent is returned."""
        with anyio.CancelScope() as work, EventSender(scope, send, self._rules, work.cancel) as sender:
            return await self._send_all(sender)
        abort = scope.get("state", {}).get(ABORT_CONNECTION)
        if abort is not None:
            abort()
        raise ClientGone

    async def _send_all(self, sender: EventSender) -> MicrobatchError | None:
        try:
            await self._produce(sender)
        except OSError as error:  # how a server says that the connection is closed
            raise ClientGone from error
        except Exception as error:
            if not isinstance(error, MicrobatchError):
                logger.exception("unexpected error in a stream")
            if not sender.started:
                return as_microbatch_error(error)
            await sender.events([error_body(as_microbatch_error(error))])
        await sender.end()
        return None
