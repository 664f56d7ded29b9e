"""API keys: ``Authorization: Bearer KEY`` on every path but the health checks."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from microbatch.api.errors import error_response
from microbatch.errors import AuthenticationError, SetupError

#: Open without a key, in exactly this writing; any other path, known or not, is guarded.
OPEN_PATHS: Final = frozenset({"/health", "/ready"})


class RequireKey:
    """ASGI middleware: answers 401 unless the request carries one of the keys. Without keys everything is open.

    ``keys`` by the name of the client that has them: ``scope["state"]["client"]``, for logs, for rates and for policies
    that are fair between clients. Keys without names are called by their place, ``key-0``.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] | Mapping[str, str] = ()) -> None:
        named = keys if isinstance(keys, Mapping) else {f"key-{index}": key for index, key in enumerate(keys)}
        if not all(named.values()):
            raise SetupError("an API key must not be empty")
        self.app = app
        self._names = list(named)
        self._keys = [key.encode("utf-8") for key in named.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys or route_path(scope) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        client = self._client(scope)
        if client is not None:
            scope.setdefault("state", {})["client"] = client
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = AuthenticationError("missing or wrong API key: send the header 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        """Which key the request carries, if any. Takes the same time whichever key matches."""
        token = _bearer_token(scope)
        # Compared as bytes: compare_digest refuses text that is not ASCII.
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return self._names[matches.index(True)] if any(matches) else None


def _bearer_token(scope: Scope) -> bytes:
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, token = values[0].strip().partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else b""


def route_path(scope: Scope) -> str:
    """The path below the place where the application is mounted, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path
