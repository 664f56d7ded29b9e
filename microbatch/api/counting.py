"""How many requests each route had, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CountRequests:
    """ASGI middleware: ``count(route, status)`` for each HTTP request that was answered.

    The route is the pattern of a known one, ``other`` for all else, so a client cannot make new series.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None], routes: Sequence[Route]) -> None:
        self.app = app
        self._count = count
        self._paths = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if status:
                self._count(self._paths.get(scope["endpoint"], "other") if "endpoint" in scope else "other", status)
