"""``GET /openapi.json``: the API as the types say that validate it, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch import __version__
from microbatch.api.auth import OPEN_PATHS
from microbatch.api.described import DESCRIPTIONS, ERROR_STATUSES, Description
from microbatch.api.errors import json_response

_REFERENCE: Final = "#/components/schemas/{name}"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class OpenAPI:
    """Describes routes. ``has_keys``: whether the API wants a key."""

    def __init__(self, routes: Sequence[Route], has_keys: bool) -> None:
        self._routes = [*routes, *self.routes()]
        self._has_keys = has_keys
        self._document: dict[str, object] | None = None

    def routes(self) -> list[Route]:
        """The one route."""
        return [Route("/openapi.json", self.page)]

    async def page(self, request: Request) -> Response:
        """The document, made when it is first asked for."""
        if self._document is None:
            self._document = self.document()
        return json_response({**self._document, "servers": [{"url": request.scope.get("root_path", "") or "/"}]})

    def document(self) -> dict[str, object]:
        """OpenAPI 3.1. ``LookupError`` when a route has no description."""
        described = [(route, DESCRIPTIONS[route.path]) for route in self._routes]
        bodies = [description.body for _, description in described if description.body is not None]
        _, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
        paths: dict[str, dict[str, object]] = {}
        for route, description in described:
            path = route.path.replace(":path}", "}")
            methods = [m for m in sorted(route.methods or ()) if m != "HEAD"]
            operations = {method.lower(): self._operation(route.path, description) for method in methods}
            paths.setdefault(path, {}).update(operations)
        document: dict[str, object] = {
            "openapi": "3.1.0",
            "info": {"title": "microbatch", "version": __version__, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": {**components, "Error": _ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
        return document

    def _operation(self, path: str, description: Description) -> dict[str, object]:
        operation: dict[str, object] = {
            "summary": description.summary,
            "responses": {**_success(description), **self._failures(path, description)},
        }
        if description.body is not None:
            schema = {"$ref": _REFERENCE.format(name=description.body.__name__)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if description.path_parameter:
            name = {"name": description.path_parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if self._has_keys and path not in OPEN_PATHS:
            operation["security"] = [{"key": []}]
        return operation

    def _failures(self, path: str, description: Description) -> Mapping[str, object]:
        statuses = [*description.failures, *((401,) if self._has_keys and path not in OPEN_PATHS else ())]
        schema = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
        return {str(s): {"description": ERROR_STATUSES[s], "content": schema} for s in statuses}


def _success(description: Description) -> dict[str, Any]:
    content: dict[str, object] = {kind: {"schema": {}} for kind in description.media_types}
    found = {"200": {"description": description.answer, "content": content}}
    if description.not_ready:
        found["503"] = {"description": "Not now; the body says why.", "content": content}
    return found
