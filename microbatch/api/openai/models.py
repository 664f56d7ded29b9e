"""The served model under its names."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.errors import json_response, quote
from microbatch.api.ports import ServingEngine
from microbatch.errors import ModelNotFoundError


class ServedModels:
    """The names that requests may use for the one model of an engine."""

    def __init__(self, engine: ServingEngine, names: Sequence[str] = ()) -> None:
        self.engine = engine
        self._names = tuple(names)
        self._created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the main one first."""
        return self._names or (self.engine.model_name,)

    def resolve(self, name: str | None) -> str:
        """The name as given, the main one for None. Raises ``ModelNotFoundError`` unless it is served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(repr(known) for known in self.names)
            raise ModelNotFoundError(f"the model {quote(name)} is not served here; served: {served}", param="model")
        return name

    def card(self, name: str) -> dict[str, object]:
        """What the API tells of a model; ``max_model_len`` bounds prompt and answer together, in tokens."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "microbatch",
            "max_model_len": self.engine.max_model_len,
        }


class Models:
    """``GET /v1/models`` and ``GET /v1/models/{id}``."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        """Both routes; an id may hold slashes."""
        return [Route("/v1/models", self.all), Route("/v1/models/{id:path}", self.one)]

    async def all(self, request: Request) -> Response:
        """All names."""
        return json_response({"object": "list", "data": [self._models.card(name) for name in self._models.names]})

    async def one(self, request: Request) -> Response:
        """One name, or 404."""
        name = request.path_params["id"]
        card = self._models.card(name)  # first: before the engine has started, 503 is right and 404 is not
        self._models.resolve(name)
        return json_response(card)
