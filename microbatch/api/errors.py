"""Every failure as ``{"error": {"message", "type", "param", "code"}}`` with the right status, and never a trace.

The tree of errors is in ``microbatch.errors``; this is the only place that turns it into HTTP.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microbatch.errors import InvalidRequestError, MicrobatchError, NotFoundError

#: Most characters of a client's own text that an error message gives back.
MAX_ECHO: Final = 100
MAX_MESSAGE: Final = 1000
MAX_RETRY_AFTER_S: Final = 120

logger = logging.getLogger("microbatch.api")


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, but not for this method."""

    status = 405


def quote(text: str) -> str:
    """A client's text for use in a message: escaped, in quotes, cut to a bound."""
    return repr(text) if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]!r}..."


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response whose body is ``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_body(error: MicrobatchError) -> dict[str, object]:
    """The body that tells an error."""
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[:MAX_MESSAGE] + "..."
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: MicrobatchError) -> Response:
    """The response that tells an error."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, min(error.retry_after, MAX_RETRY_AFTER_S)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)


def as_microbatch_error(error: Exception) -> MicrobatchError:
    """The error to tell a client in place of any exception; what is unknown says nothing about itself."""
    if isinstance(error, MicrobatchError):
        return error
    return MicrobatchError("internal error; the server's log has the cause", code="internal_error")


async def on_microbatch_error(request: Request, error: Exception) -> Response:
    """Handler of ``MicrobatchError`` for Starlette."""
    return error_response(as_microbatch_error(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of what Starlette itself raises: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:MAX_ECHO]} {quote(request.url.path)}"
    response: Response
    if error.status_code == 404:
        response = error_response(NotFoundError(f"{where}: no such path"))
    elif error.status_code == 405:
        response = error_response(MethodNotAllowedError(f"{where}: the path does not take this method"))
    else:
        response = json_response(error_body(InvalidRequestError(error.detail)), error.status_code)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """The methods of a path. Several routes may share it, and the router names only those of the first."""
    routes = [r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Handler of a closed connection: nobody reads the answer, only an access log shows the status."""
    return Response(status_code=499)


class CatchErrors:
    """ASGI middleware: an exception that nobody expected is logged and becomes a 500, or ends a begun response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if started:
                raise
            logger.exception("unexpected error on %s %s", scope["method"], quote(scope["path"]))
            await error_response(as_microbatch_error(error))(scope, receive, send)
