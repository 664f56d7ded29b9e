"""The server process: the HTTP front over an engine, its start, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

import uvicorn

from microbatch.api.app import create_app
from microbatch.api.rates import RateLimiter
from microbatch.api.request_limits import RequestLimits
from microbatch.api.tracing import Tracing
from microbatch.connection import Connection
from microbatch.errors import MicrobatchError, SetupError
from microbatch.settings import Settings
from microbatch.wiring import Engine

logger = logging.getLogger(__name__)

#: After the engine has drained: seconds for the last bytes of open answers to leave.
_LAST_BYTES_S = 2


def run_server(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after a drain, 1 when the engine could not go on.

    Raises ``SetupError`` when the model cannot be loaded. While it loads, ``/health`` answers 503 with the reason, and
    a signal ends the process.
    """
    engine = Engine.of(settings)
    app = create_app(
        engine,
        api_keys=settings.api_keys(),
        served_model_names=settings.served_model_name,
        max_body_bytes=settings.max_body_mb * 2**20,
        limits=RequestLimits(settings.max_n, settings.max_stop),
        rates=RateLimiter(settings.rate_limit_requests, settings.rate_limit_tokens),
        cors_origins=settings.cors_origin,
        tracing=Tracing.to(settings.otlp_endpoint) if settings.otlp_endpoint else None,
        heartbeat_s=settings.heartbeat_s,
        send_timeout_s=settings.send_timeout_s,
        max_unread_tokens=settings.max_unread_tokens,
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        lifespan="off",
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_BYTES_S,
    )
    server = Server(config, engine, settings.drain_timeout_s)
    loop = (config.get_loop_factory() or asyncio.new_event_loop)()
    try:
        status = loop.run_until_complete(server.run())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    if server.left_loading:  # its thread cannot be stopped, and the interpreter would wait for it
        logging.shutdown()
        os._exit(status)
    return status


class Server(uvicorn.Server):
    """A uvicorn server that drains its engine before it closes.

    A signal while the model loads ends it at once. Later the first signal refuses new requests and lets the others
    finish, for at most the drain time-out; the second one ends them at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._ending = asyncio.Event()
        self._impatient = asyncio.Event()
        self._loaded = False
        #: The end came before the model was there, and a thread still loads it.
        self.left_loading = False

    async def run(self) -> int:  # type: ignore[override]
        """Everything from the first socket to the last; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        front = asyncio.create_task(self.serve())
        loading = asyncio.create_task(self._engine.start())
        try:
            await self._until_the_end(front, loading)
        finally:
            await self._shut_down(front, loading)
        if loading.done() and not loading.cancelled() and (error := loading.exception()) is not None:
            raise error if isinstance(error, MicrobatchError) else SetupError(f"the model could not be loaded: {error}")
        return 0 if self._ending.is_set() else 1

    async def _until_the_end(self, front: asyncio.Task[None], loading: asyncio.Task[None]) -> None:
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({front, loading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is None:
                self._loaded = True
                self._announce()
                await asyncio.wait({front, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()

    async def _shut_down(self, front: asyncio.Task[None], loading: asyncio.Task[None]) -> None:
        if loading.done() and loading.exception() is None:
            drain = asyncio.create_task(self._engine.drain(self._drain_timeout_s))
            impatient = asyncio.create_task(self._impatient.wait())
            await asyncio.wait({drain, impatient}, return_when=asyncio.FIRST_COMPLETED)
            impatient.cancel()
            if not drain.done():
                drain.cancel()
                await self._engine.drain(0)
        self.left_loading = not loading.done()
        self.should_exit = True
        await asyncio.wait({front})
        if not self.left_loading:
            await self._engine.close()

    def _announce(self) -> None:
        for listener in getattr(self, "servers", []):
            for sock in listener.sockets:
                host, port = sock.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                logger.info("serving %s on http://%s:%d", self._engine.model_name, shown, port)

    def _on_signal(self) -> None:
        if self._ending.is_set():
            logger.warning("ending at once")
            self._impatient.set()
        elif not self._loaded:
            logger.info("ending before the model is ready")
            self._ending.set()
        else:
            logger.info("draining for at most %g s; a second signal ends at once", self._drain_timeout_s)
            self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again at the end, and the exit status would not be 0."""
        yield
