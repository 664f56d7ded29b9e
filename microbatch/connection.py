"""A connection of the server: uvicorn's, whose errors look like ours, and that a handler can cut off."""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microbatch.api.errors import error_body
from microbatch.api.sse import ABORT_CONNECTION
from microbatch.errors import InvalidRequestError


class Connection(HttpToolsProtocol):
    """Closing a connection waits until its buffer is sent; with a client that does not read, for ever. So handlers find
    ``transport.abort`` in ``scope["state"]``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT_CONNECTION: transport.abort}

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed as HTTP gets an error of the API too."""
        body = msgspec.json.encode(error_body(InvalidRequestError(msg)))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
