"""One line for each request: what was asked, how it ended, how long it took. Never a header, a query or a body."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microbatch.api.auth import OPEN_PATHS, route_path
from microbatch.api.errors import quote

logger = logging.getLogger("microbatch.access")


class AccessLog:
    """ASGI middleware: logs to ``microbatch.access`` when a request has ended; health checks only at debug level.

    A server's own access log should be off: it shows queries, where some clients put their key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            level = logging.DEBUG if route_path(scope) in OPEN_PATHS else logging.INFO
            logger.log(
                level,
                "%s %s %s %.0f ms client=%s id=%s",
                scope["method"],
                quote(scope["path"]),
                status or "closed",
                (time.perf_counter() - begin) * 1000,
                scope.get("state", {}).get("client", "-"),
                scope.get("state", {}).get("request_id", "-"),
            )
