"""A client that leaves: its request is aborted at once, waiting or running, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from microbatch.api.app import create_app
from microbatch.api.disconnect import ClientGone, gather, while_connected
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import BOTH, COMPLETIONS, RawClient, body

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [b"", b"Hello"], ids=["waiting", "running"])
async def test_leaving_aborts(path: str, stream: bool, text: bytes) -> None:
    engine = FakeEngine(default=Script(text, hold=True))
    raw = RawClient(path, json.dumps(body(path, stream=stream)).encode())
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(raw.run, create_app(engine))
            await engine.news.wait()  # all tokens are out, the end is not
            assert engine.aborted == []
            raw.leave()
    assert engine.aborted == [engine.requests[0].request_id]
    assert b"[DONE]" not in raw.content
    assert raw.status in (None, 200, 499)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_aborts_every_prompt(stream: bool) -> None:
    engine = FakeEngine(default=Script(hold=True))
    raw = RawClient(COMPLETIONS, json.dumps(body(COMPLETIONS, prompt=["A", "B", "C"], stream=stream)).encode())
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(raw.run, create_app(engine))
            await engine.news.wait()
            raw.leave()
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert len(engine.aborted) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_server_task_aborts(stream: bool) -> None:
    engine = FakeEngine(default=Script(hold=True))
    raw = RawClient(COMPLETIONS, json.dumps(body(COMPLETIONS, stream=stream)).encode())
    async with anyio.create_task_group() as group:
        group.start_soon(raw.run, create_app(engine))
        await engine.news.wait()
        group.cancel_scope.cancel()
    assert len(engine.aborted) == 1


async def test_leaving_before_the_body_is_complete() -> None:
    raw = RawClient(COMPLETIONS, b"")
    raw._incoming = [{"type": "http.request", "body": b"{", "more_body": True}]
    raw.leave()
    engine = FakeEngine()
    await raw.run(create_app(engine))
    assert (raw.status, engine.requests) == (499, [])


async def test_a_server_that_tells_a_closed_connection_by_an_error() -> None:
    engine = FakeEngine(default=Script(hold=True))
    raw = RawClient(COMPLETIONS, json.dumps(body(COMPLETIONS, stream=True)).encode())

    async def closed(message: Any) -> None:
        raise OSError("broken pipe")

    raw.on_send = closed
    with anyio.fail_after(5):
        await raw.run(create_app(engine))
    assert len(engine.aborted) == 1


async def test_while_connected_gives_the_result_or_the_error() -> None:
    raw = RawClient("/", b"")

    async def work() -> int:
        return 5

    async def fail() -> int:
        raise KeyError("as it is")

    assert await while_connected(raw.receive, work) == 5
    with pytest.raises(KeyError):
        await while_connected(raw.receive, fail)
    raw.leave()
    with pytest.raises(ClientGone):
        await while_connected(raw.receive, anyio.sleep_forever)


async def test_gather_keeps_order_and_raises_the_first_error() -> None:
    async def value(number: int) -> int:
        await anyio.lowlevel.checkpoint()
        return number

    assert await gather([lambda: value(1), lambda: value(2)]) == [1, 2]
    ended: list[str] = []

    async def wait() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")
        return 0

    async def fail() -> int:
        raise KeyError("as it is")

    with pytest.raises(KeyError):
        await gather([wait, fail, wait])
    assert ended.count("cancelled") >= 1
