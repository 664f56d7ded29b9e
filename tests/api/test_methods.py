"""Methods of every route: what it takes, what it refuses and how, and that no route is open by mistake."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.app import create_app
from microbatch.api.auth import OPEN_PATHS
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import LiveServer
from tests.api.support import RawClient, client_of, error_of
from tests.engine.factory import make_engine

pytestmark = pytest.mark.anyio
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


def taken() -> dict[str, set[str]]:
    """Methods by path; a parameter is the name of the served model."""
    found: dict[str, set[str]] = {}
    for route in create_app(FakeEngine()).routes:
        assert isinstance(route, Route)
        found.setdefault(route.path.replace("{id:path}", "fake/model"), set()).update(route.methods or ())
    assert not any("{" in path for path in found), "teach this test the parameter"
    return found


TAKEN = taken()


@pytest.mark.parametrize("path", TAKEN)
async def test_other_methods_are_refused_with_those_that_work(path: str) -> None:
    async with client_of(create_app(FakeEngine())) as client:
        for method in (m for m in METHODS if m not in TAKEN[path]):
            response = await client.request(method, path)
            assert response.status_code == 405, method
            if method != "HEAD":
                assert error_of(response, 405)["type"] == "invalid_request_error"
            assert set(response.headers["allow"].split(", ")) == TAKEN[path]


@pytest.mark.parametrize("path", [path for path in TAKEN if "GET" in TAKEN[path]])
async def test_head_is_get_without_the_body(path: str) -> None:
    async with client_of(create_app(FakeEngine())) as client:
        got, head = await client.get(path), await client.head(path)
    assert got.status_code == head.status_code == 200
    assert list(got.headers) == list(head.headers) and "content-length" in head.headers
    assert got.headers["content-type"] == head.headers["content-type"]


@pytest.mark.parametrize("path", sorted(TAKEN.keys() - OPEN_PATHS))
async def test_no_route_works_without_a_key(path: str) -> None:
    variants = (
        path,
        f"/{path}",
        path.upper(),
        f"{path}/",
        f"{path}?api_key=sk-secret",
        f"/.{path}",
        f"/health/..{path}",
    )
    for variant in variants:
        for method in METHODS:
            raw = RawClient(variant.partition("?")[0], b"{}", method)
            raw.scope["query_string"] = variant.partition("?")[2].encode()
            await raw.run(create_app(FakeEngine(), api_keys=["sk-secret"]))
            assert (raw.status, raw.headers[b"www-authenticate"]) == (401, b"Bearer"), (variant, method)
            assert json.loads(raw.content)["error"]["code"] == "invalid_api_key"


async def test_methods_of_several_routes_of_one_path_are_named_together() -> None:
    async def nothing(request: Request) -> Response:
        return Response()

    app = create_app(FakeEngine())
    app.router.routes += [Route("/v1/two", nothing, methods=["POST"]), Route("/v1/two", nothing, methods=["DELETE"])]
    async with client_of(app) as client:
        assert (await client.get("/v1/two")).headers["allow"] == "DELETE, POST"
        assert (await client.delete("/v1/two")).status_code == 200


@pytest.fixture
def server() -> Iterator[LiveServer]:
    live = LiveServer(make_engine(), api_keys=["k"])
    live.start()
    yield live
    live.stop()


def test_heads_and_refusals_over_a_socket(server: LiveServer) -> None:
    """No body follows a HEAD, whatever its status: the next answer on the connection would be read out of step."""
    key = "Authorization: Bearer k\r\n"
    requests = (
        ("HEAD /health HTTP/1.1", "", 200),
        ("HEAD /v1/models HTTP/1.1", key, 200),
        ("HEAD /v1/models HTTP/1.1", "", 401),
        ("HEAD /v1/chat/completions HTTP/1.1", key, 405),
        ("HEAD /nope HTTP/1.1", key, 404),
        ("OPTIONS /v1/chat/completions HTTP/1.1", key, 405),
        ("OPTIONS * HTTP/1.1", key, 404),
        ("GET //v1/models HTTP/1.1", "", 401),
        ("GET http://elsewhere/v1/models HTTP/1.1", "", 401),
        ("GET /v1/models HTTP/1.1", key, 200),
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        with closing(connection.makefile("rb")) as reader:
            for line, headers, status in requests:
                connection.sendall(f"{line}\r\nHost: x\r\n{headers}\r\n".encode())
                assert int(reader.readline().split()[1]) == status, line
                length = 0
                while (header := reader.readline()) != b"\r\n":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                assert length
                if not line.startswith("HEAD"):
                    assert json.loads(reader.read(length))
