"""A request id in every answer: the client's own when it is harmless, else a new one."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Where the first middleware puts its own ``send``. Those behind it look at the start of a response alone, so what
#: sends thousands of pieces a second need not pass them with each.
SEND_BODY: Final = "send_body"
_VALID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestId:
    """ASGI middleware: puts ``X-Request-Id`` into the answer and ``scope["state"]["request_id"]``.

    An id of other characters, or too long, could forge lines of a log; it is replaced.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _given(scope) or secrets.token_hex(16).encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state[SEND_BODY] = send

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, with_id)


def _given(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value if _VALID.fullmatch(value) else None
    return None
