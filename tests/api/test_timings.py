"""Timings of one request for the client that asks, and the fingerprint of the system."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from microbatch.api.app import create_app
from microbatch.api.openai.timings import timings_body
from microbatch.engine.outputs import Timings
from microbatch.settings import make_settings
from microbatch.wiring import fingerprint_of
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, body, client_of, events

pytestmark = pytest.mark.anyio
NAMES = {"queue_ms", "ttft_ms", "e2e_ms"}


async def send(path: str, asked: str | None = "true", **fields: Any) -> httpx2.Response:
    headers = {} if asked is None else {"X-Include-Timings": asked}
    async with client_of(create_app(FakeEngine()), headers=headers) as client:
        return await client.post(path, content=json.dumps(body(path, **fields)))


def test_the_longest_of_several_prompts() -> None:
    parts = [Timings(0.5, 0.75, 2.0), Timings(0.25, None, 4.0), Timings(None, 1.0, 3.0)]
    assert timings_body(parts) == {"queue_ms": 500.0, "ttft_ms": 1000.0, "e2e_ms": 4000.0}
    assert timings_body([Timings(None, None, None)]) == dict.fromkeys(NAMES)


@pytest.mark.parametrize("path", BOTH)
async def test_an_answer_tells_its_timings_when_asked(path: str) -> None:
    answer = await send(path)
    assert set(answer.json()["timings"]) == NAMES and answer.json()["timings"]["e2e_ms"] == 0
    for asked in (None, "false", ""):
        answer = await send(path, asked)
        assert "timings" not in answer.json() and "X-Queue-Time-Ms" not in answer.headers


@pytest.mark.parametrize("path", BOTH)
async def test_a_stream_tells_them_in_its_last_chunk(path: str) -> None:
    chunks = events(await send(path, stream=True))
    assert set(chunks[-1]["timings"]) == NAMES and chunks[-1]["choices"] == [] and "usage" not in chunks[-1]
    assert all("timings" not in chunk for chunk in chunks[:-1])
    chunks = events(await send(path, stream=True, stream_options={"include_usage": True}))
    assert set(chunks[-1]["timings"]) == NAMES and chunks[-1]["usage"]["completion_tokens"] == 5
    assert [chunk for chunk in events(await send(path, None, stream=True)) if not chunk["choices"]] == []


@pytest.mark.parametrize("path", BOTH)
async def test_every_answer_and_chunk_has_the_fingerprint(path: str) -> None:
    assert (await send(path)).json()["system_fingerprint"] == "fp_fake"
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    assert {chunk["system_fingerprint"] for chunk in events(await send(path, **fields))} == {"fp_fake"}


def test_the_fingerprint_is_that_of_model_and_precision() -> None:
    def of(name: str = "m", dtype: str = "float32", **settings: Any) -> str:
        return fingerprint_of(make_settings(settings), name, dtype)

    assert of() == of() == of(policy="window", port=1) and of().startswith("fp_") and len(of()) == 15
    others = [of("n"), of(dtype="bfloat16"), of(quantization="int8"), of(kv_dtype="int8"), of(cpu_weights="bfloat16")]
    assert len({of(), *others}) == 6
