"""No body over the limit is read into memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microbatch.api.errors import error_response
from microbatch.errors import PayloadTooLargeError


class LimitBody:
    """ASGI middleware: 413 at once when the declared length is over ``max_bytes``, or when more bytes have come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared is not None and declared > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._error()
            return message

        await self.app(scope, counted, send)

    def _error(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is over the limit of {self._max_bytes} bytes")


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
