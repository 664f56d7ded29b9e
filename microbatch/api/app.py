"""The ASGI application over one engine."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from microbatch.api.access_log import AccessLog
from microbatch.api.auth import RequireKey
from microbatch.api.disconnect import ClientGone
from microbatch.api.errors import CatchErrors, on_client_gone, on_http_exception, on_microbatch_error
from microbatch.api.health import Health
from microbatch.api.limits import LimitBody
from microbatch.api.metrics import EngineMetrics
from microbatch.api.openai.chat import ChatCompletions
from microbatch.api.openai.completions import Completions
from microbatch.api.openai.models import Models, ServedModels
from microbatch.api.openai.tokenize import Tokenize
from microbatch.api.ports import ServingEngine
from microbatch.api.request_id import RequestId
from microbatch.errors import MicrobatchError


def create_app(
    engine: ServingEngine,
    *,
    api_keys: Sequence[str] = (),
    served_model_names: Sequence[str] = (),
    max_body_bytes: int = 8 * 2**20,
    max_prompts: int = 128,
) -> Starlette:
    """An application that serves ``engine``, alone or mounted in another one; it needs no lifespan.

    With ``api_keys`` every path but ``/health`` and ``/ready`` wants one of them. ``served_model_names`` replace the
    engine's own name; the first is the main one. ``max_prompts`` bounds the prompts of one completions request.
    """
    models = ServedModels(engine, served_model_names)
    metrics = EngineMetrics(engine)
    engine.add_observer(metrics)
    parts = (
        Health(engine),
        metrics,
        Models(models),
        Completions(engine, models, max_prompts),
        ChatCompletions(engine, models),
        Tokenize(engine, models),
    )
    app = Starlette(
        routes=[route for part in parts for route in part.routes()],
        middleware=[
            Middleware(RequestId),
            Middleware(AccessLog),
            Middleware(CatchErrors),
            Middleware(RequireKey, keys=tuple(api_keys)),
            Middleware(LimitBody, max_bytes=max_body_bytes),
        ],
        exception_handlers={
            MicrobatchError: on_microbatch_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_gone,
            ClientGone: on_client_gone,
        },
    )
    app.router.redirect_slashes = False  # a redirect is not an error body, and clients drop their key on the way
    return app
