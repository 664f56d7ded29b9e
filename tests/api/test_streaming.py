"""Streams: the form of events, the role, the end, usage, and errors before and after the first event."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest

from microbatch.api.app import create_app
from microbatch.api.errors import error_body
from microbatch.core.request import FinishReason
from microbatch.errors import ExecutionError, QueueDeadlineError
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import BOTH, CHAT, COMPLETIONS, RawClient, body, error_of, events, post

pytestmark = pytest.mark.anyio
ON_BOTH = pytest.mark.parametrize("path", BOTH)


async def stream(engine: FakeEngine, path: str, **fields: Any) -> list[dict[str, Any]]:
    return events(await post(engine, path, stream=True, **fields))


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    parts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices_of(chunks, index)]
    return "".join(parts)


@ON_BOTH
async def test_chunks_share_id_model_and_time(path: str) -> None:
    chunks = await stream(FakeEngine(), path)
    assert {chunk["object"] for chunk in chunks} == {
        "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    }
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert text_of(chunks) == "Hello"
    assert not any("usage" in chunk for chunk in chunks)


@ON_BOTH
async def test_headers(path: str) -> None:
    response = await post(FakeEngine(), path, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("text", [b"Hello", b""])
async def test_role_comes_once_and_first(n: int, text: bytes) -> None:
    chunks = await stream(FakeEngine(default=Script(text)), CHAT, n=n)
    for index in range(n):
        deltas = [choice["delta"] for choice in choices_of(chunks, index)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])
        assert deltas[-1] == {}


@ON_BOTH
@pytest.mark.parametrize("n", [1, 3])
async def test_one_finish_reason_at_the_end(path: str, n: int) -> None:
    chunks = await stream(FakeEngine(), path, n=n, max_tokens=3)
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in choices_of(chunks, index)]
        assert reasons[-1] == "length" and not any(reasons[:-1])
        assert text_of(chunks, index) == "Hel"


async def test_several_prompts_interleave_under_their_index() -> None:
    engine = FakeEngine()
    engine.scripts.extend([Script(b"one"), Script(b"three"), Script(b"5")])
    chunks = await stream(engine, COMPLETIONS, prompt=["A", "B", "C"], n=2)
    assert [text_of(chunks, index) for index in range(6)] == ["one", "one", "three", "three", "5", "5"]
    first_of_last = next(i for i, chunk in enumerate(chunks) if chunk["choices"][0]["index"] == 4)
    last_of_first = max(i for i, chunk in enumerate(chunks) if chunk["choices"][0]["index"] == 0)
    assert first_of_last < last_of_first


@ON_BOTH
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_is_the_last_chunk_when_asked_for(path: str, n: int) -> None:
    engine = FakeEngine(default=Script(cached_tokens=1))
    plain = (await post(engine, path, n=n)).json()["usage"]
    chunks = await stream(engine, path, n=n, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["object"] == chunks[0]["object"]


@ON_BOTH
@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}]
)
async def test_no_usage_unless_asked_for(path: str, options: Any) -> None:
    chunks = await stream(FakeEngine(), path, stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_streamed_chat_logprobs_equal_plain_ones() -> None:
    engine = FakeEngine(default=Script("aé".encode()))
    fields = {"logprobs": True, "top_logprobs": 1}
    plain = (await post(engine, CHAT, **fields)).json()["choices"][0]["logprobs"]["content"]
    chunks = await stream(engine, CHAT, **fields)
    assert [e for c in choices_of(chunks) if c["logprobs"] for e in c["logprobs"]["content"]] == plain


@ON_BOTH
async def test_no_part_of_a_stop_text_is_sent(path: str) -> None:
    chunks = await stream(FakeEngine(default=Script(b"one END two", hold=True)), path, stop=["END"])
    assert text_of(chunks) == "one "
    assert choices_of(chunks)[-1]["finish_reason"] == "stop"


@ON_BOTH
async def test_a_bad_request_is_a_json_error_before_any_event(path: str) -> None:
    for fields in ({"n": 0}, {"temperature": -1}, {"max_tokens": -5}):
        error_of(await post(FakeEngine(), path, stream=True, **fields))
    error_of(await post(FakeEngine(), path, stream=True, model="no-such-model"), 404)


@ON_BOTH
async def test_an_error_before_the_first_event_has_its_own_status(path: str) -> None:
    script = Script(b"", error=QueueDeadlineError("waited too long", retry_after=500))
    response = await post(FakeEngine(default=script), path, stream=True)
    assert error_of(response, 503)["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "120"


@ON_BOTH
@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(b"He", error=ExecutionError("not a number")), ExecutionError("not a number")),
        (Script(b"He", FinishReason.ERROR), ExecutionError("the request failed")),
    ],
)
async def test_an_error_after_the_first_event_is_an_event(path: str, script: Script, error: ExecutionError) -> None:
    chunks = await read_step_by_step(FakeEngine(default=script), path)
    assert chunks[-1] == error_body(error)
    assert text_of(chunks[:-1]) == "He"
    assert not any(choice["finish_reason"] for choice in choices_of(chunks[:-1]))


@ON_BOTH
async def test_an_aborted_stream_never_says_stop(path: str) -> None:
    chunks = await read_step_by_step(FakeEngine(default=Script(b"He", FinishReason.ABORT)), path)
    assert chunks[-1]["error"]["code"] == "aborted"
    assert not any(choice["finish_reason"] for choice in choices_of(chunks[:-1]))


@ON_BOTH
async def test_an_unknown_error_in_a_stream_says_nothing_of_itself(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(default=Script(b"He", hold=True))
    app = create_app(engine)
    raw = RawClient(path, json.dumps(body(path, stream=True)).encode())

    async def fail_inside(message: Any) -> None:
        if b"H" in message.get("body", b""):
            raise KeyError("a secret of the server")

    raw.on_send = fail_inside
    with caplog.at_level(logging.ERROR):
        await raw.run(app)
    assert raw.content.endswith(b'"code":"internal_error"}}\n\ndata: [DONE]\n\n')
    assert b"secret" not in raw.content[raw.content.index(b'"error"') :]
    assert "a secret of the server" in caplog.text
    assert len(engine.aborted) == 1


async def read_step_by_step(engine: FakeEngine, path: str) -> list[dict[str, Any]]:
    """The events of a stream whose reader keeps up with every token, so that none are joined."""
    raw = RawClient(path, json.dumps(body(path, stream=True)).encode())
    with anyio.fail_after(5):
        await raw.run(create_app(engine))
    assert raw.status == 200 and raw.content.endswith(b"data: [DONE]\n\n")
    return [json.loads(block[len(b"data: ") :]) for block in raw.content.split(b"\n\n")[:-2]]
