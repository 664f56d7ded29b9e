"""``/openapi.json``: every route is in it, and what it says holds for requests that a machine makes up from it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.app import create_app
from microbatch.api.described import DESCRIPTIONS
from microbatch.api.openapi import OpenAPI
from tests.api.fake_engine import FakeEngine
from tests.api.support import CHAT, client_of

anyio = pytest.mark.anyio


@anyio
async def test_every_route_is_described_with_its_errors_and_its_key() -> None:
    app = create_app(FakeEngine(), api_keys=["k"])
    assert {route.path for route in app.routes} == set(DESCRIPTIONS)  # type: ignore[attr-defined]
    async with client_of(app, headers={"Authorization": "Bearer k"}) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1") and len(document["paths"]) == len(DESCRIPTIONS)
    chat = document["paths"][CHAT]["post"]
    assert chat["security"] == [{"key": []}] and "security" not in document["paths"]["/health"]["get"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(chat["responses"])
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert fields["required"] == ["messages"] and {"temperature", "tools", "response_format"} <= set(
        fields["properties"]
    )


@anyio
async def test_a_mounted_application_says_where_it_is() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with client_of(Starlette(routes=[Mount("/llm", create_app(FakeEngine()))])) as client:
        assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]


def test_methods_of_several_routes_of_one_path_are_all_described() -> None:
    async def nothing(request: Request) -> Response:
        return Response()

    routes = [Route("/health", nothing, methods=[method]) for method in ("POST", "DELETE")]
    paths = OpenAPI(routes, False).document()["paths"]
    assert isinstance(paths, dict) and set(paths["/health"]) == {"post", "delete"}


CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeEngine()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@SCHEMA.parametrize()
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_requests_made_from_the_document_get_what_it_says(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(checks=CHECKS.get_by_names(list(CHECKED)))  # type: ignore[arg-type]
