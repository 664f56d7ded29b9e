"""Silence and slow readers: heartbeats, joined chunks, and a reader that is dropped at a bound while others go on."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from starlette.types import Message

from microbatch.api.app import create_app
from microbatch.core.request import FinishReason
from microbatch.errors import QueueDeadlineError
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import BOTH, CHAT, COMPLETIONS, RawClient, body

pytestmark = pytest.mark.anyio
ON_BOTH = pytest.mark.parametrize("path", BOTH)
PING = b": ping\n\n"


class Reader(RawClient):
    """A streaming client; while ``closed`` is set, what is sent to it does not go through."""

    def __init__(self, path: str, **fields: Any) -> None:
        super().__init__(path, json.dumps(body(path, stream=True, **fields)).encode())
        self.seen = anyio.Event()
        self.go_on = anyio.Event()
        self.stops_at = b"\x00"
        self.on_send = self._take

    async def _take(self, message: Message) -> None:
        if PING in message.get("body", b""):
            self.seen.set()
        if self.stops_at in message.get("body", b""):
            self.seen.set()
            await self.go_on.wait()

    def texts(self) -> list[str]:
        blocks = [block[len(b"data: ") :] for block in self.content.split(b"\n\n") if block.startswith(b"data: {")]
        choices = [choice for block in blocks for choice in json.loads(block).get("choices", [])]
        return [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]


def dropped(engine: FakeEngine) -> dict[str, float]:
    """What the metrics say."""
    registry = engine.observers[0].registry  # type: ignore[attr-defined]
    names = ("timeout", "unread")
    return {
        name: registry.get_sample_value("microbatch:slow_readers_dropped_total", {"reason": name}) for name in names
    }


@ON_BOTH
async def test_silence_is_filled_with_comments_also_while_the_request_waits(path: str) -> None:
    engine = FakeEngine(default=Script(b"", hold=True))
    reader = Reader(path)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run, create_app(engine, heartbeat_s=0.001))
            await reader.seen.wait()
            reader.leave()
    assert reader.status == 200 and reader.content.startswith(PING)
    assert reader.headers[b"cache-control"] == b"no-cache" and reader.headers[b"x-accel-buffering"] == b"no"
    assert len(engine.aborted) == 1


async def test_after_a_heartbeat_an_error_is_an_event() -> None:
    engine = FakeEngine(default=Script(b"", hold=True))
    reader = Reader(COMPLETIONS)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run, create_app(engine, heartbeat_s=0.001))
            await reader.seen.wait()
            (stream,) = engine.streams
            stream.fail(QueueDeadlineError("waited too long"))
    assert b'data: {"error":{"message":"waited too long"' in reader.content
    assert reader.content.endswith(b"data: [DONE]\n\n")


async def test_without_heartbeats_there_are_none() -> None:
    engine = FakeEngine()
    reader = Reader(CHAT)
    await reader.run(create_app(engine, heartbeat_s=0, send_timeout_s=0))
    assert PING not in reader.content and "".join(reader.texts()) == "Hello"


@ON_BOTH
async def test_what_piles_up_is_one_chunk(path: str) -> None:
    engine = FakeEngine(default=Script(b"abcdefghij", hold=True))
    reader = Reader(path, logprobs=1 if path == COMPLETIONS else True)
    reader.stops_at = b'"a"'
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run, create_app(engine))
            await reader.seen.wait()
            await engine.news.wait()
            reader.go_on.set()
            for stream in engine.streams:
                stream.abort()
    assert [text for text in reader.texts() if text] == ["a", "bcdefghij"]


@ON_BOTH
async def test_a_reader_that_takes_nothing_is_dropped_and_others_go_on(path: str) -> None:
    engine = FakeEngine(default=Script(b"abc", hold=True))
    app = create_app(engine, send_timeout_s=0.01)
    reader, good = Reader(path), Reader(path)
    reader.stops_at = b'"a"'
    closed: list[bool] = []
    reader.scope["state"] = {"abort_connection": lambda: closed.append(True)}
    with anyio.fail_after(5):
        await reader.run(app)  # ends by itself
        engine.default = Script(b"abc")
        await good.run(app)
    assert closed == [True] and engine.aborted == [engine.requests[0].request_id]
    assert dropped(engine) == {"timeout": 1, "unread": 0}
    assert "".join(good.texts()) == "abc" and b"[DONE]" not in reader.content


@ON_BOTH
@pytest.mark.parametrize("length", [9, 10])
async def test_a_reader_with_too_much_unread_is_dropped(path: str, length: int) -> None:
    """One token has been taken, 8 may wait; with the tenth they are 9."""
    engine = FakeEngine(default=Script(b"abcdefghij"[:length], hold=True))
    app = create_app(engine, max_unread_tokens=8)
    reader = Reader(path)
    reader.stops_at = b'"a"'
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run, app)
            await engine.news.wait()
            reader.leave()
    assert dropped(engine) == {"timeout": 0, "unread": length - 9}
    assert len(engine.aborted) == 1


async def test_an_answer_that_is_not_streamed_has_no_such_bound() -> None:
    engine = FakeEngine(default=Script(b"abcdefghij", FinishReason.STOP))
    raw = RawClient(COMPLETIONS, json.dumps(body(COMPLETIONS)).encode())
    await raw.run(create_app(engine, max_unread_tokens=1, send_timeout_s=0.001))
    assert json.loads(raw.content)["choices"][0]["text"] == "abcdefghij" and dropped(engine)["unread"] == 0
