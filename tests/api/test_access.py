"""Keys, body limits, request ids, unknown paths and unexpected errors."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from microbatch.api.app import create_app
from microbatch.errors import SetupError
from tests.api.fake_engine import FakeEngine
from tests.api.support import CHAT, COMPLETIONS, RawClient, body, client_of, error_of

pytestmark = pytest.mark.anyio
KEY = "sk-secret-ké"


async def status_with(*authorization: bytes, path: str = "/v1/models", method: str = "GET") -> tuple[int | None, bytes]:
    raw = RawClient(path, b"{}", method, [(b"authorization", value) for value in authorization])
    await raw.run(create_app(FakeEngine(), api_keys=["other", KEY]))
    if raw.status == 401:
        assert raw.headers[b"www-authenticate"] == b"Bearer"
        assert json.loads(raw.content)["error"]["type"] == "authentication_error"
    assert b"sk-secret" not in raw.content
    return raw.status, raw.content


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer",
        b"Bearer ",
        b"",
        b"Bearer sk-secret",
        b"Basic " + KEY.encode(),
        KEY.encode(),
        b"Bearer x " + KEY.encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + KEY.encode("latin-1"),
        b"Bearer " + b"a" * 10_000,
        b"Bearer null",
        b"Bearer other," + KEY.encode(),
    ],
)
async def test_a_wrong_key(value: bytes) -> None:
    assert (await status_with(value))[0] == 401


async def test_no_key_and_two_keys() -> None:
    assert (await status_with())[0] == 401
    good = b"Bearer " + KEY.encode()
    assert (await status_with(good, good))[0] == 401


@pytest.mark.parametrize("value", ["Bearer other", f"Bearer {KEY}", f"bearer  {KEY} "])
async def test_a_right_key(value: str) -> None:
    assert (await status_with(value.encode()))[0] == 200


@pytest.mark.parametrize(
    "path",
    (
        "/metrics /nope / //v1/models /V1/models /v1/models/ /v1/models/x"
        " /health/ /HEALTH //health /healthy /health/../v1/models"
    ).split(),
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
async def test_every_other_path_is_guarded(path: str, method: str) -> None:
    assert (await status_with(path=path, method=method))[0] == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_is_open(path: str) -> None:
    assert (await status_with(path=path))[0] == 200


async def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", spy)
    await status_with(b"Bearer other")
    assert compared == [(b"other", b"other"), (b"other", KEY.encode())]


async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    for keys in (["k"], []):
        scope = {"type": "websocket", "path": "/v1/models", "headers": [], "subprotocols": []}
        await create_app(FakeEngine(), api_keys=keys)(scope, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]
        sent.clear()


def test_a_server_may_run_the_lifespan() -> None:
    with TestClient(create_app(FakeEngine(), api_keys=["k"])) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 401


async def test_the_engine_learns_which_key() -> None:
    engine = FakeEngine()
    async with client_of(create_app(engine, api_keys=["a", "b"]), headers={"Authorization": "Bearer b"}) as client:
        assert (await client.post(COMPLETIONS, json=body(COMPLETIONS))).status_code == 200
    assert engine.requests[0].client == "key-1"


def test_an_empty_key_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="empty"):
        create_app(FakeEngine(), api_keys=["a", ""]).build_middleware_stack()


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    raw = RawClient(CHAT, b"", headers=[(b"content-length", b"2000000000")])
    raw._incoming.clear()
    with anyio.fail_after(5):
        await raw.run(create_app(FakeEngine()))
    assert raw.status == 413
    assert json.loads(raw.content)["error"]["code"] == "payload_too_large"


async def test_a_body_that_grows_over_the_limit_is_refused() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with client_of(create_app(FakeEngine(), max_body_bytes=1000)) as client:
        assert error_of(await client.post(COMPLETIONS, content=parts()), 413)["code"] == "payload_too_large"
        good = json.dumps(body(COMPLETIONS)).encode()
        assert (await client.post(COMPLETIONS, content=good + b" " * (1000 - len(good)))).status_code == 200
        error_of(await client.post(COMPLETIONS, content=good + b" " * (1001 - len(good))), 413)


@pytest.mark.parametrize("given", ["abc", "A.b_c-9", "x" * 128])
async def test_a_harmless_request_id_comes_back(given: str) -> None:
    async with client_of(create_app(FakeEngine())) as client:
        assert (await client.get("/v1/models", headers={"X-Request-Id": given})).headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", [b"a%0aERROR fake", b"\x1b[31mred", b"x" * 60_000, b"a\tb", b"<script>", b"", b"\xff"]
)
async def test_an_odd_request_id_is_replaced(given: bytes) -> None:
    raw = RawClient("/v1/models", b"", "GET", [(b"x-request-id", given)])
    await raw.run(create_app(FakeEngine()))
    assert raw.headers[b"x-request-id"] != given and raw.headers[b"x-request-id"].isalnum()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/nope", 404),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/metrics", 405),
        ("GET", "/" + "x" * 5000, 404),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    async with client_of(create_app(FakeEngine())) as client:
        response = await client.request(method, path)
    assert len(error_of(response, status)["message"]) < 300
    assert response.headers["x-request-id"]
    assert ("allow" in response.headers) == (status == 405)


async def test_an_unexpected_error_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise KeyError("a secret of the server")

    with caplog.at_level(logging.ERROR):
        async with client_of(create_app(Broken())) as client:
            response = await client.post(COMPLETIONS, json=body(COMPLETIONS))
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text and "a secret of the server" in caplog.text
    assert response.headers["x-request-id"]


async def test_the_log_has_one_harmless_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "microbatch"):
        async with client_of(create_app(FakeEngine(), api_keys=["sk-secret"])) as client:
            headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "abc"}
            await client.post(
                COMPLETIONS + "?api_key=sk-secret", json=body(COMPLETIONS, prompt="word"), headers=headers
            )
            await client.get("/v1/a%0ACRITICAL%20forged%1b[31m", headers={"X-Request-Id": "a%0aERROR forged"})
            await client.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and not any("\n" in line or "\x1b" in line for line in lines)
    assert lines[0].startswith("POST '/v1/completions' 200 ") and lines[0].endswith(" id=abc")
    assert lines[1].startswith(r"GET '/v1/a\nCRITICAL forged\x1b[31m' 401 ")
    assert "sk-secret" not in caplog.text and "word" not in caplog.text and "ERROR forged" not in caplog.text


async def test_the_application_can_be_mounted() -> None:
    app = Starlette(routes=[Mount("/llm", create_app(FakeEngine(), api_keys=["k"]))])
    async with client_of(app) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        client.headers["Authorization"] = "Bearer k"
        assert (await client.post("/llm" + CHAT, json=body(CHAT))).status_code == 200
        error_of(await client.get("/llm/nope"), 404)
        assert (await client.get("/llm/metrics")).status_code == 200


async def names(app: Starlette, *paths: str) -> Sequence[httpx2.Response]:
    async with client_of(app) as client:
        return [await client.get(path) for path in paths]


async def test_models() -> None:
    listed, one, unknown = await names(
        create_app(FakeEngine()), "/v1/models", "/v1/models/fake%2Fmodel", "/v1/models/no-such-model"
    )
    (card,) = listed.json()["data"]
    assert listed.json()["object"] == "list" and one.json() == card
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake/model", "model", 512)
    assert isinstance(card["created"], int) and isinstance(card["owned_by"], str)
    assert error_of(unknown, 404)["code"] == "model_not_found"


async def test_served_names_replace_the_engines_own() -> None:
    app = create_app(FakeEngine(), served_model_names=["main", "alias"])
    listed, alias, own = await names(app, "/v1/models", "/v1/models/alias", "/v1/models/fake/model")
    assert [card["id"] for card in listed.json()["data"]] == ["main", "alias"]
    assert (alias.status_code, own.status_code) == (200, 404)
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body(CHAT, model="alias"))
    assert answer.json()["model"] == "alias"
