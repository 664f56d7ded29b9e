"""Liveness and readiness, answered from memory."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.errors import json_response
from microbatch.api.ports import ServingEngine
from microbatch.errors import DrainingError, EngineDeadError, MicrobatchError, UnavailableError


class Health:
    """``/health``: is this process worth keeping? ``/ready``: should a balancer send it requests?"""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        """Both routes."""
        return [Route("/health", self.health), Route("/ready", self.ready)]

    async def health(self, request: Request) -> Response:
        """200 while the engine works, draining included; 503 while it starts and after it has died."""
        return self._answer("ready", "draining")

    async def ready(self, request: Request) -> Response:
        """200 only while requests are accepted."""
        return self._answer("ready")

    def _answer(self, *good: str) -> Response:
        status = self._engine.status
        body = {"status": status.state, "reason": status.reason or None}
        return json_response(body, 200 if status.state in good else 503)


def check_accepting(engine: ServingEngine) -> None:
    """Raise why no request can be accepted now, before any work on one."""
    state, reason = engine.status
    error: MicrobatchError
    match state:
        case "ready":
            return
        case "starting":
            error = UnavailableError(reason or "the server is starting", code="starting", retry_after=5)
        case "draining":
            error = DrainingError(reason or "the server is shutting down", retry_after=5)
        case _:
            error = EngineDeadError(reason or "the engine has ended")
    raise error
