"""The official Python client, and a real server on a loopback port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import anyio
import httpx2
import openai
import pytest
import uvicorn

from microbatch.api.app import create_app
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import BOTH, COMPLETIONS, MODEL, body

pytestmark = pytest.mark.anyio
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@contextlib.asynccontextmanager
async def client_for(engine: FakeEngine, key: str = "k") -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(app=create_app(engine, api_keys=["k"]))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


async def test_models() -> None:
    async with client_for(FakeEngine()) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_completions() -> None:
    async with client_for(FakeEngine()) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=["A", "B"], logprobs=2, extra_body={"top_k": 1, "stop_token_ids": []}
        )
        assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
        parts = [
            (chunk.choices[0].text if chunk.choices else "", chunk.usage)
            async for chunk in await client.completions.create(
                model=MODEL, prompt="A", stream=True, stream_options={"include_usage": True}
            )
        ]
    assert "".join(text for text, _ in parts) == "Hello"
    assert parts[-1][1] is not None and parts[-1][1].completion_tokens == 5


async def test_chat() -> None:
    async with client_for(FakeEngine(default=Script(cached_tokens=3))) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert (final.choices[0].message.content, final.choices[0].message.role) == ("Hello", "assistant")


WEATHER: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = b'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_tool_calls() -> None:
    async with client_for(FakeEngine(default=Script(CALL))) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False
        )
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    for choice in (answer.choices[0], final.choices[0]):
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


async def test_errors_become_the_clients_own() -> None:
    async with client_for(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
    async with client_for(FakeEngine(), key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@contextlib.asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[str]:
    """The address of a real server over ``engine``."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(engine), lifespan="off", log_level="error"))
    async with anyio.create_task_group() as group:
        group.start_soon(server.serve, [listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_socket_aborts(path: str, stream: bool) -> None:
    engine = FakeEngine(default=Script(hold=True))
    async with served(engine) as address, httpx2.AsyncClient(base_url=address) as client:
        with anyio.move_on_after(10) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: client.post(path, json=body(path, stream=stream)))
                await engine.news.wait()
                engine.news.clear()
                group.cancel_scope.cancel()
            await engine.news.wait()  # the abort
        assert not scope.cancelled_caught
        assert len(engine.aborted) == 1
        engine.default = Script()
        assert (await client.post(path, json=body(path))).status_code == 200


async def test_events_arrive_one_by_one() -> None:
    engine = FakeEngine(default=Script(b"H", hold=True))
    async with served(engine) as address, httpx2.AsyncClient(base_url=address) as client:
        with anyio.fail_after(10):
            async with client.stream("POST", COMPLETIONS, json=body(COMPLETIONS, stream=True)) as response:
                async for line in response.aiter_lines():
                    assert '"text":"H"' in line
                    break  # it came although the answer has not ended


async def test_a_body_over_the_limit_gets_its_answer() -> None:
    async with served(FakeEngine()) as address, httpx2.AsyncClient(base_url=address) as client:
        response = await client.post(COMPLETIONS, content=b"x" * (9 * 2**20))
        assert response.status_code == 413
        assert (await client.post(COMPLETIONS, json=body(COMPLETIONS))).status_code == 200
