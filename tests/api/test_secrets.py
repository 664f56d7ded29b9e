"""Nothing that a client sends forges a line of the log, and no key is in a log, an answer or the metrics. No address
that a message names is asked."""

from __future__ import annotations

import io
import json
import logging
import socket

import httpx2
import pytest

from microbatch.api.app import create_app
from microbatch.logs import configure_logging
from tests.api.fake_engine import FakeEngine, Script
from tests.api.support import BOTH, CHAT, COMPLETIONS, body, client_of, error_of

pytestmark = pytest.mark.anyio
NASTY = "x\nCRITICAL forged\r\x1b[31m\x00\x85\u2028\u202e"
RIGHT, WRONG, QUERY = "sk-right-secret", "sk-wrong-secret", "sk-query-secret"


class Fragile(FakeEngine):
    """Fails on some prompts with all it knows."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "fail" in text:
            raise RuntimeError(f"cannot read {text} of the client with Bearer {RIGHT}")
        return await super().encode(text)


async def attack(engine: FakeEngine) -> list[httpx2.Response]:
    """Every place where a client may put text, and keys in all that may hold one."""
    engine.scripts.append(Script(error=RuntimeError(f"{NASTY} {RIGHT}")))
    async with client_of(create_app(engine, api_keys={"team": RIGHT})) as client:
        right = {"Authorization": f"Bearer {RIGHT}", "X-Request-Id": "a%0aERROR forged"}
        answers = [
            await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt=prompt), headers=right)
            for prompt in ("the model fails", NASTY, f"fail {NASTY}")
        ]
        for path in BOTH:
            for fields in ({"model": NASTY}, {NASTY: 1}, {"user": NASTY}, {"stop": [NASTY] * 99}, {"n": NASTY}):
                answers.append(await client.post(path, json=body(path, **fields), headers=right))
        answers.append(
            await client.post(CHAT, json=body(CHAT, messages=[{"role": NASTY, "content": ""}]), headers=right)
        )
        for path in ("/v1/models", "/metrics", "/nope%0aCRITICAL%20forged%1b%e2%80%a8", "/v1/models/a%0d%0ab%c2%85"):
            for headers in (right, {"Authorization": f"Bearer {WRONG}"}, {"Authorization": f"Basic {WRONG}"}, {}):
                answers.append(await client.get(f"{path}?api_key={QUERY}&x=%0d%0aSet-Cookie:a", headers=headers))
    return answers


@pytest.mark.parametrize("as_json", [False, True])
async def test_one_line_an_event_and_no_key_anywhere(log: io.StringIO, as_json: bool) -> None:
    configure_logging("debug", as_json=as_json, secrets=[RIGHT], stream=log)
    events: list[logging.LogRecord] = []
    counter = logging.Handler()
    counter.emit = events.append  # type: ignore[assignment,method-assign]
    logging.getLogger().addHandler(counter)
    answers = await attack(Fragile())
    lines = log.getvalue().splitlines()
    assert len(lines) == len(events) >= len(answers) and all(line.isprintable() for line in lines)
    assert not any(line.startswith(("CRITICAL", "ERROR forged")) for line in lines)
    if as_json:
        assert {json.loads(line)["level"] for line in lines} == {"info", "error"}
    assert {200, 400, 401, 404, 500} == {answer.status_code for answer in answers}
    for answer in answers:
        head = "".join(f"{name}: {value}\n" for name, value in answer.headers.items())
        assert not any(key in answer.text + head for key in (RIGHT, WRONG, QUERY))
        assert "set-cookie" not in answer.headers and "forged" not in head
    assert not any(key in log.getvalue() for key in (RIGHT, WRONG, QUERY))


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_an_address_in_a_message_is_not_asked(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        own = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        async with client_of(create_app(FakeEngine())) as client:
            for url in (own, own.replace("http", "https"), "http://169.254.169.254/latest/", "file:///etc/passwd"):
                for value in ({"url": url}, url, {"data": url, "file_id": url, "file_data": url}):
                    parts = [{"type": "text", "text": "Look"}, {"type": kind, kind: value}]
                    message = {"role": "user", "content": parts}
                    assert "root:" not in (await client.post(CHAT, json=body(CHAT, messages=[message]))).text
                    error = error_of(await client.post(CHAT, json=body(CHAT, messages=[message])))
                    assert error["code"] == "unsupported_value"
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_the_limit_of_a_body_holds_for_data_in_a_message() -> None:
    image = {"url": "data:image/png;base64," + "A" * 20_000_000}
    message = {"role": "user", "content": [{"type": "image_url", "image_url": image}]}
    async with client_of(create_app(FakeEngine())) as client:
        error_of(await client.post(CHAT, json=body(CHAT, messages=[message])), 413)
