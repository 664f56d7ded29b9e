"""The ASGI application over one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from microbatch.api.access_log import AccessLog
from microbatch.api.auth import RequireKey
from microbatch.api.counting import CountRequests
from microbatch.api.disconnect import ClientGone
from microbatch.api.errors import CatchErrors, on_client_gone, on_http_exception, on_microbatch_error
from microbatch.api.event_sender import StreamRules
from microbatch.api.health import Health
from microbatch.api.limits import LimitBody
from microbatch.api.metrics import EngineMetrics
from microbatch.api.openai.chat import ChatCompletions
from microbatch.api.openai.completions import Completions
from microbatch.api.openai.models import Models, ServedModels
from microbatch.api.openai.tokenize import Tokenize
from microbatch.api.openapi import OpenAPI
from microbatch.api.ports import ServingEngine
from microbatch.api.rates import RateLimiter
from microbatch.api.request_id import RequestId
from microbatch.api.request_limits import RequestLimits
from microbatch.api.tracing import Tracing
from microbatch.errors import MicrobatchError


def create_app(
    engine: ServingEngine,
    *,
    api_keys: Sequence[str] | Mapping[str, str] = (),
    served_model_names: Sequence[str] = (),
    max_body_bytes: int = 8 * 2**20,
    max_prompts: int = 128,
    limits: RequestLimits = RequestLimits(),
    rates: RateLimiter | None = None,
    cors_origins: Sequence[str] = (),
    tracing: Tracing | None = None,
    heartbeat_s: float = 15.0,
    send_timeout_s: float = 30.0,
    max_unread_tokens: int = 4096,
) -> Starlette:
    """An application that serves ``engine``, alone or mounted in another one; it needs no lifespan.

    With ``api_keys``, or keys by the names of their clients, every path but ``/health`` and ``/ready`` wants one of
    them. Pages of ``cors_origins`` may call the API from a browser; ``*`` stands for all. ``served_model_names``
    replace the engine's own name; the first is the main one. ``max_prompts`` bounds the prompts of one completions
    request. The last three concern event streams, as ``StreamRules`` says.
    """
    models = ServedModels(engine, served_model_names)
    metrics = EngineMetrics(engine)
    rates = rates or RateLimiter()
    rates.refused = partial(metrics.request_rejected, "rate_limit")
    engine.add_observer(metrics)
    engine.add_observer(rates)
    if tracing is not None:
        engine.add_observer(tracing)
    parts = (
        Health(engine),
        metrics,
        Models(models),
        Completions(engine, models, max_prompts),
        ChatCompletions(engine, models),
        Tokenize(engine, models),
    )
    routes = [route for part in parts for route in part.routes()]
    routes += OpenAPI(routes, bool(api_keys)).routes()
    app = Starlette(
        routes=routes,
        middleware=[
            *_cors(cors_origins),
            Middleware(RequestId),
            Middleware(CountRequests, count=metrics.http_request, routes=routes),
            Middleware(AccessLog),
            Middleware(CatchErrors),
            Middleware(RequireKey, keys=api_keys),
            Middleware(LimitBody, max_bytes=max_body_bytes),
        ],
        exception_handlers={
            MicrobatchError: on_microbatch_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_gone,
            ClientGone: on_client_gone,
        },
    )
    app.state.limits, app.state.rates, app.state.tracing = limits, rates, tracing
    app.state.streaming = StreamRules(heartbeat_s, send_timeout_s, max_unread_tokens, metrics.reader_dropped)
    app.router.redirect_slashes = False  # a redirect is not an error body, and clients drop their key on the way
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Outermost, so that refusals can be read by the page too, and a preflight, which carries no key, is answered."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]
