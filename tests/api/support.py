"""Requests to the application without a server: through a client, or message by message."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import httpx2
from starlette.types import ASGIApp, Message

from microbatch.api.app import create_app
from tests.api.fake_engine import FakeEngine

MODEL = "fake/model"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A good request, changed by ``fields``."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {"model": MODEL, **prompt, **fields}


@contextlib.asynccontextmanager
async def client_of(app: ASGIApp, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client whose requests go straight into ``app``."""
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test", **options) as client:
        yield client


async def post(engine: FakeEngine, path: str, content: Any = None, **fields: Any) -> httpx2.Response:
    """Send a good request, changed by ``fields``, or the bytes ``content``."""
    async with client_of(create_app(engine)) as client:
        if content is not None:
            return await client.post(path, content=content)
        return await client.post(path, content=json.dumps(body(path, **fields)))


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The parsed events of a stream, which must be whole."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[len("data: ") :]) for block in blocks[:-2]]


def error_of(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error in a body, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str)
    assert "Traceback" not in response.text and "site-packages" not in response.text
    return error


class RawClient:
    """One request, message by message; ``leave`` closes the connection."""

    def __init__(
        self, path: str, content: bytes, method: str = "POST", headers: list[tuple[bytes, bytes]] | None = None
    ):
        self.scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers or [],
            "server": ("test", 80),
        }
        self.sent: list[Message] = []
        self.on_send: Callable[[Message], Awaitable[None]] | None = None
        self._incoming: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        self._gone = anyio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if self.on_send is not None:
            await self.on_send(message)

    async def run(self, app: ASGIApp) -> None:
        await app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(next(m["headers"] for m in self.sent if m["type"] == "http.response.start"))

    @property
    def content(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")
