"""``/tokenize`` and ``/detokenize``: what completions and chats are fed, and back."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2
import pytest

from microbatch.api.app import create_app
from microbatch.engine.stats import EngineStatus
from microbatch.text.bytes_tokenizer import ByteTokenizer
from tests.api.fake_engine import FakeEngine
from tests.api.support import CHAT, COMPLETIONS, client_of, error_of, post

pytestmark = pytest.mark.anyio


async def send(path: str, engine: FakeEngine | None = None, **fields: Any) -> httpx2.Response:
    async with client_of(create_app(engine or FakeEngine())) as client:
        return await client.post(path, content=json.dumps(fields))


async def test_a_prompt() -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(add_bos=True))
    answer = (await send("/tokenize", engine, prompt="é!", model="fake/model")).json()
    assert answer == {"count": 4, "max_model_len": 512, "tokens": [256, 195, 169, 33], "token_strs": None}
    plain = (await send("/tokenize", engine, prompt="é!", add_special_tokens=False, return_token_strs=True)).json()
    assert (plain["tokens"], plain["token_strs"]) == ([195, 169, 33], ["\ufffd", "\ufffd", "!"])
    assert (await send("/tokenize", engine, prompt="", add_special_tokens=False)).json()["tokens"] == []


async def test_it_is_what_the_endpoints_feed() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    await post(engine, CHAT, messages=messages)
    chat = (await send("/tokenize", messages=messages, add_generation_prompt=True, add_special_tokens=False)).json()
    await post(engine, COMPLETIONS, prompt="Hi")
    text = (await send("/tokenize", prompt="Hi")).json()
    assert [tuple(chat["tokens"]), tuple(text["tokens"])] == [r.prompt_token_ids for r in engine.requests]


async def test_back_to_text() -> None:
    assert (await send("/detokenize", tokens=[*"é!".encode(), 257])).json() == {"prompt": "é!<eos>"}
    assert (await send("/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "banana", "content": "Hi"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True},
         "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
         "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**64]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(await send(path, **fields))["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_refusals_before_the_body_is_looked_at(path: str) -> None:
    error_of(await send(path, model="no-such-model", prompt="a", tokens=[1]), 400)
    fields: dict[str, Any] = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    assert error_of(await send(path, model="no-such-model", **fields), 404)["code"] == "model_not_found"
    error_of(await send(path, FakeEngine(status=EngineStatus("starting")), **fields), 503)


async def test_half_a_surrogate_pair() -> None:
    async with client_of(create_app(FakeEngine())) as client:
        error_of(await client.post("/tokenize", content=b'{"prompt":"a\\ud83d"}'))


async def test_the_event_loop_is_left_free() -> None:
    threads: set[int] = set()

    class Watched(ByteTokenizer):
        def decode(self, *arguments: Any, **options: Any) -> str:
            threads.add(threading.get_ident())
            return super().decode(*arguments, **options)

        def token_text(self, token_id: int) -> tuple[str, bytes]:
            threads.add(threading.get_ident())
            return super().token_text(token_id)

    engine = FakeEngine(tokenizer=Watched())
    await send("/tokenize", engine, prompt="abc", return_token_strs=True)
    await send("/detokenize", engine, tokens=[65])
    assert threads and threading.get_ident() not in threads
