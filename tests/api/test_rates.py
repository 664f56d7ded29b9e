"""Requests and tokens a minute of each client; limits of one request; origins."""

from __future__ import annotations

import httpx2
import pytest
from starlette.applications import Starlette

from microbatch.api.app import create_app
from microbatch.api.rates import MAX_CLIENTS, RateLimiter
from microbatch.api.request_limits import RequestLimits
from microbatch.core.request import FinishReason
from microbatch.engine.outputs import Timings, Usage
from microbatch.engine.stats import EngineStatistics, RequestRecord
from microbatch.errors import InvalidRequestError, RateLimitError
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, CHAT, COMPLETIONS, body, client_of, error_of

pytestmark = pytest.mark.anyio


class Clock:
    """A time that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def limited(
    engine: FakeEngine, requests: int | None, tokens: int | None = None, **options: object
) -> tuple[Starlette, Clock]:
    clock = Clock()
    return create_app(engine, rates=RateLimiter(requests, tokens, clock), **options), clock  # type: ignore[arg-type]


def finish(engine: FakeEngine, completion_tokens: int) -> None:
    """Tell the observers that the newest request has ended, as the engine does."""
    request = engine.requests[-1]
    usage = Usage(len(request.prompt_token_ids), completion_tokens, 0)
    for observer in engine.observers:
        observer.request_finished(RequestRecord.make(request, FinishReason.STOP, usage, Timings(0.0, 0.0, 0.0)))


@pytest.mark.parametrize("path", BOTH)
async def test_the_third_request_of_a_minute_is_refused_until_its_time(path: str) -> None:
    engine = FakeEngine()
    app, clock = limited(engine, 2)
    async with client_of(app) as client:
        for _ in range(2):
            assert (await client.post(path, json=body(path))).status_code == 200
        refused = await client.post(path, json=body(path))
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 requests a minute" in error["message"] and refused.headers["retry-after"] == "30"
        clock.now += 30
        assert (await client.post(path, json=body(path, stream=True))).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'microbatch:admission_rejections_total{reason="rate_limit"} 1.0' in metrics
    assert len(engine.requests) == 3


async def test_each_key_has_its_own_rate_and_its_name_reaches_the_engine() -> None:
    engine = FakeEngine()
    app, _ = limited(engine, 1, api_keys={"alice": "a", "bob": "b"})
    async with client_of(app) as client:
        statuses = [
            (await client.post(CHAT, json=body(CHAT), headers={"Authorization": f"Bearer {key}"})).status_code
            for key in "aabb"
        ]
    assert statuses == [200, 429, 200, 429]
    assert [request.client for request in engine.requests] == ["alice", "bob"]


async def test_tokens_are_reserved_and_what_was_not_used_comes_back() -> None:
    engine = FakeEngine()
    app, _ = limited(engine, None, 100)
    async with client_of(app) as client:
        first = body(COMPLETIONS, prompt="x" * 10, max_tokens=60)
        assert (await client.post(COMPLETIONS, json=first)).status_code == 200
        assert "100 tokens a minute" in error_of(await client.post(COMPLETIONS, json=first), 429)["message"]
        finish(engine, completion_tokens=20)
        assert (await client.post(COMPLETIONS, json=first)).status_code == 200
        finish(engine, completion_tokens=60)
        error_of(await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt="x")), 429)


async def test_a_request_that_the_engine_refuses_costs_no_tokens() -> None:
    engine = FakeEngine()
    app, _ = limited(engine, None, 600)
    engine.refusals.extend([InvalidRequestError("no"), None, InvalidRequestError("no")])
    async with client_of(app) as client:
        for prompt in ("Hi", ["Hi", "Ho"]):
            error_of(await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt=prompt, max_tokens=200)))
        finish(engine, completion_tokens=0)
        answer = await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt="x" * 100, max_tokens=400))
    assert answer.status_code == 200


def test_clients_that_have_nothing_to_wait_for_are_forgotten_first() -> None:
    clock = Clock()
    limiter = RateLimiter(1, None, clock)
    limiter.admit("waits", {})
    for number in range(MAX_CLIENTS - 1):
        limiter.admit(f"client-{number}", {})
    clock.now += 59
    limiter.admit("late", {})
    assert len(limiter._clients) < MAX_CLIENTS
    with pytest.raises(RateLimitError):
        limiter.admit("late", {})
    clock.now += 60
    for number in range(MAX_CLIENTS):
        limiter.admit(f"other-{number}", {})
    assert len(limiter._clients) <= MAX_CLIENTS


def test_without_limits_nothing_is_kept() -> None:
    limiter = RateLimiter()
    limiter.admit("a", {"x": 5})
    limiter.settle("x", 3)
    assert not limiter._clients and not limiter._reserved


@pytest.mark.parametrize("path", BOTH)
async def test_an_operator_may_narrow_choices_and_stop_texts(path: str) -> None:
    async with client_of(create_app(FakeEngine(), limits=RequestLimits(max_n=2, max_stop=1))) as client:
        assert (await client.post(path, json=body(path, n=2, stop=["a"]))).status_code == 200
        error = error_of(await client.post(path, json=body(path, n=3)))
        assert error["param"] == "n" and "at most 2" in error["message"]
        error = error_of(await client.post(path, json=body(path, stop=["a", "b"])))
        assert error["param"] == "stop" and "at most 1" in error["message"]


async def test_more_answers_to_choose_from_count_as_choices() -> None:
    async with client_of(create_app(FakeEngine(), limits=RequestLimits(max_n=2))) as client:
        error = error_of(await client.post(COMPLETIONS, json=body(COMPLETIONS, best_of=3)))
        assert error["param"] == "best_of" and "at most 2" in error["message"]
        assert (await client.post(COMPLETIONS, json=body(COMPLETIONS, best_of=2))).status_code == 200


async def test_prompts_that_do_not_fit_into_the_queue_together_are_counted() -> None:
    class Full(FakeEngine):
        def statistics(self) -> EngineStatistics:
            return super().statistics()._replace(num_waiting=255)

    async with client_of(create_app(Full())) as client:
        error_of(await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt=["a", "b"])), 429)
        assert 'admission_rejections_total{reason="queue_full"} 1.0' in (await client.get("/metrics")).text


async def test_requests_are_counted_by_route_and_status() -> None:
    engine = FakeEngine()
    async with client_of(create_app(engine)) as client:
        await client.post(CHAT, json=body(CHAT))
        await client.post(CHAT, content=b"{")
        await client.get("/v1/models/fake%2Fmodel")
        await client.get("/wp-login.php")
        text = (await client.get("/metrics")).text
    for route, status in ((CHAT, 200), (CHAT, 400), ("/v1/models/{id:path}", 200), ("other", 404)):
        assert f'microbatch:http_requests_total{{route="{route}",status="{status}"}} 1.0' in text, (route, status)
    assert "wp-login" not in text


# ---- origins


def headers_of(response: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


async def test_no_page_of_another_origin_may_call_unless_it_is_named() -> None:
    async with client_of(create_app(FakeEngine())) as client:
        response = await client.post(CHAT, json=body(CHAT), headers={"Origin": "https://page.example"})
        assert response.status_code == 200 and not headers_of(response)
        response = await client.options(
            CHAT, headers={"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        )
        assert response.status_code == 405 and not headers_of(response)


async def test_a_named_origin_may_ask_first_without_a_key_and_reads_refusals() -> None:
    app = create_app(FakeEngine(), api_keys=["k"], cors_origins=["https://page.example"])
    origin = {"Origin": "https://page.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with client_of(app) as client:
        preflight = await client.options(CHAT, headers={**origin, **asks})
        assert preflight.status_code == 200
        assert headers_of(preflight)["access-control-allow-origin"] == "https://page.example"
        refused = await client.post(CHAT, json=body(CHAT), headers=origin)
        assert refused.status_code == 401
        assert headers_of(refused)["access-control-allow-origin"] == "https://page.example"
        other = await client.post(CHAT, json=body(CHAT), headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in headers_of(other)
