"""A server over real sockets in a thread of its own: the real engine over a fake executor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from microbatch.api.app import create_app
from microbatch.connection import Connection
from microbatch.engine.client import AsyncEngine
from tests.engine.factory import make_engine


class LiveServer:
    """Its port, its engine, and plain requests to it."""

    def __init__(self, engine: AsyncEngine, send_buffer: int = 0, **options: Any) -> None:
        self.engine = engine
        self._options = options
        self._socket = socket.create_server(("127.0.0.1", 0))
        if send_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections have it from here
        self.port: int = self._socket.getsockname()[1]
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        app = create_app(self.engine, **self._options)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=Connection)
        self._server = uvicorn.Server(config)
        async with self.engine:
            serving = asyncio.create_task(self._server.serve([self._socket]))
            while not self._server.started:
                await asyncio.sleep(0.001)
            self._ready.set()
            await serving

    def start(self) -> None:
        """Returns when requests are taken."""
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        """Ends the server and the engine."""
        assert self._server is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()

    def until_idle(self) -> None:
        """Until nothing runs or waits; then every block must be free."""
        for _ in range(2000):
            numbers = self.engine.statistics()
            if numbers.num_running == numbers.num_waiting == 0:
                break
            threading.Event().wait(0.005)
        else:
            raise AssertionError(f"still busy: {numbers}")
        assert numbers.num_free_blocks == numbers.num_blocks


@contextlib.contextmanager
def live_server(engine: AsyncEngine | None = None, **options: Any) -> Iterator[LiveServer]:
    """A running server; by default with the ``continuous`` policy and a small store."""
    server = LiveServer(engine or make_engine(policy="continuous"), **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
