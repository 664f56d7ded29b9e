"""What is refused, where the fault is said to be, and what is fine."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from microbatch.api.app import create_app
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, CHAT, COMPLETIONS, body, client_of, error_of, post

pytestmark = pytest.mark.anyio
ON_BOTH = pytest.mark.parametrize("path", BOTH)

NULLABLE = (
    "max_tokens temperature top_p n stop seed stream stream_options logit_bias logprobs presence_penalty"
    " frequency_penalty top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens priority cache_salt"
    " user metadata store service_tier structured_outputs response_format some_unknown_field"
).split()
NULLABLE_OWN = {
    COMPLETIONS: ["echo", "best_of", "suffix"],
    CHAT: (
        "max_completion_tokens top_logprobs tools tool_choice functions function_call" " parallel_tool_calls modalities"
    ).split(),
}


@ON_BOTH
async def test_null_is_as_good_as_absent(path: str) -> None:
    response = await post(FakeEngine(), path, **dict.fromkeys(NULLABLE + NULLABLE_OWN[path]))
    assert response.status_code == 200, response.text


WRONG: list[tuple[str, list[Any]]] = [
    ("model", [5, {"a": 1}]),
    ("max_tokens", [0, -1, 1.5, -(10**12), "5", "many", [5], {"a": 1}, True, 1e3]),
    ("n", [0, -1, 1.5, 129, 10**6, 10**18, 10**30, True, "1"]),
    ("temperature", [-1, -0.01, 2.0001, 1e6, "0", "hot", [1], {}, True]),
    ("top_p", [-1, 1.1, 5, "x"]),
    ("presence_penalty", [2.1, -2.1, 100]),
    ("frequency_penalty", [2.1, -2.1, 100]),
    ("repetition_penalty", [0, -1]),
    ("min_p", [-0.1, 1.5]),
    ("top_k", [-5, 1.5]),
    ("min_tokens", [-1]),
    ("seed", [1.5, "x", True, 2**64]),
    ("stop", [5, {"a": 1}, [5], [None], True, "", [""], ["", "zz"], ["x"] * 17, "x" * 2000]),
    ("stop_token_ids", [5, ["a"], [-1], [True]]),
    ("logit_bias", ["x", [1], {"5": "x"}, {"5": 101}, {"5": -100.5}, {"5": None}, {"5": [1]}, {"5": True}, {"-1": 1}]),
    ("logit_bias", [{"abc": 1}, {"": 1}, {"1.0": 1}, {"07": 1}, {" 7": 1}, {"٧": 1}, {str(i): 1 for i in range(2000)}]),
    ("ignore_eos", [1, "yes"]),
    ("stream", ["maybe", 5]),
    ("stream_options", ["x", [1], {"include_usage": True}]),
    ("priority", [1.5, 2**40]),
    ("cache_salt", [5, "x" * 300]),
    ("metadata", [5, {"a": 1}]),
    ("user", [5]),
    ("store", [True]),
    ("service_tier", ["flex", 5]),
    (
        "structured_outputs",
        [5, "x", [], {}, {"regex": "a", "choice": ["b"]}, {"regex": ""}, {"regex": 5}, {"xml": "a"}],
    ),
    ("structured_outputs", [{"json": 5}, {"json_object": "yes"}, {"choice": "a"}, {"choice": []}, {"regex": "("}]),
    ("response_format", [5, "json", [], {}, {"type": "x"}, {"type": "json_schema"}, {"type": "json_object", "x": 1}]),
    (
        "response_format",
        [{"type": "json_schema", "json_schema": s} for s in ("x", {}, {"name": 5}, {"name": "a", "x": 1})],
    ),
    (
        "response_format",
        [{"type": "json_schema", "json_schema": {"name": "a", "schema": s}} for s in (5, {"type": "x"})],
    ),
    ("nonsense", [1, "x", {}, [], False]),
]
WRONG_COMPLETION: list[tuple[str, list[Any]]] = [
    ("prompt", [None, 5, {"a": 1}, True, [], [[]], "", [""], ["a", ""], [None], [True], [1.5], [[1.5]], [[[1]]]]),
    ("prompt", [[-1], [[-1]], [258], [2**31], [2**63], [2**64 + 5], [5, -7, 5], [[1], [259]]]),
    ("prompt", [[1, "a"], ["a", 1], ["a", [1]], [[1], "a"], ["x"] * 129, [[1]] * 129]),
    ("logprobs", [-1, 6, 10**6, "x", 1.5, True]),
    ("best_of", [-1, 0, 21, 10**6]),
    ("echo", ["x", 1]),
    ("suffix", ["x"]),
    ("messages", [[]]),
]
WRONG_CHAT: list[tuple[str, list[Any]]] = [
    ("max_completion_tokens", [0, -1, 1.5, "5"]),
    ("logprobs", [1, "x"]),
    ("top_logprobs", [-1, 2, 21, 10**6, "x", 1.5]),
    ("prompt", ["x"]),
    ("echo", [True]),
]
CASES = [
    pytest.param(path, field, value, id=f"{path.rsplit('/')[-1]}-{field}-{number}")
    for path, tables in ((COMPLETIONS, (WRONG, WRONG_COMPLETION)), (CHAT, (WRONG, WRONG_CHAT)))
    for table in tables
    for number, (field, values) in enumerate(table)
    for value in values
]


@pytest.mark.parametrize(("path", "field", "value"), CASES)
async def test_a_wrong_value_is_refused_and_named(path: str, field: str, value: Any) -> None:
    engine = FakeEngine()
    error = error_of(await post(engine, path, **{field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == field
    assert len(error["message"]) < 600
    assert engine.requests == []


@pytest.mark.parametrize("top", [-1, 21])
async def test_top_logprobs_out_of_range(top: int) -> None:
    assert error_of(await post(FakeEngine(), CHAT, logprobs=True, top_logprobs=top))["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "n": 1, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 2, "temperature": -1}, "temperature"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "maybe"}}, "stream_options.include_usage"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ],
)
async def test_values_that_do_not_go_together(path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(await post(FakeEngine(), path, **fields))["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-10},
        {"temperature": 2},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": 10**12},
        {"n": 128},
        {"stop": []},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"logit_bias": {}},
        {"logit_bias": {"0": 100, "5": -100}},
        {"stop_token_ids": []},
    ],
)
@ON_BOTH
async def test_values_at_the_edge_are_fine(path: str, fields: dict[str, Any]) -> None:
    response = await post(FakeEngine(), path, **fields)
    assert response.status_code == 200, response.text


async def test_a_bad_token_id_is_named_with_its_place() -> None:
    error = error_of(await post(FakeEngine(), COMPLETIONS, prompt=[[1, 2], [3, 300]]))
    assert error["message"] == "prompt[1][1] is 300: token ids are from 0 to 257"
    error = error_of(await post(FakeEngine(), COMPLETIONS, prompt=[5, 2**64 + 5]))
    assert error["message"].startswith(f"prompt[1] is {2**64 + 5}:")


async def test_an_unknown_field_is_named() -> None:
    error = error_of(await post(FakeEngine(), COMPLETIONS, max_token=5))
    assert (error["message"], error["param"], error["code"]) == (
        "unknown field 'max_token'",
        "max_token",
        "unknown_parameter",
    )


async def test_a_field_that_is_not_implemented_is_named() -> None:
    error = error_of(await post(FakeEngine(), COMPLETIONS, suffix="x"))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_value")


@ON_BOTH
async def test_an_unknown_model_is_404(path: str) -> None:
    for name in ("no-such-model", "x\r\nSet-Cookie: a=b", "\x1b[31mx", "x" * 5000):
        response = await post(FakeEngine(), path, model=name)
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(error["message"]) < 400 and "\n" not in error["message"] and "\x1b" not in error["message"]
        assert "set-cookie" not in response.headers


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none(field: str, token: str) -> None:
    content = json.dumps(body(COMPLETIONS, **{field: 12345})).replace("12345", token)
    error_of(await post(FakeEngine(), COMPLETIONS, content.encode()))


@ON_BOTH
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"true",
        b'"x"',
        b"1",
        b'{"a":1}{',
        b"\xff\xfe{\x00}\x00",
        b"hello",
        b'{"model": "x", }',
        b"{'model': 'x'}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"fake/model","prompt":"\xff"}',
        gzip.compress(b"{}"),
    ],
)
async def test_a_body_that_is_no_json_object(path: str, content: bytes) -> None:
    error_of(await post(FakeEngine(), path, content))


async def test_nesting_of_any_depth_is_refused() -> None:
    for depth in (1, 100, *range(800, 1100, 20), 10_000):
        content = [{"type": "text", "text": "a", "x": None}]
        text = json.dumps(body(CHAT, messages=[{"role": "user", "content": content}]))
        nested = text.replace('"x": null', '"x": ' + "[" * depth + "]" * depth)
        error_of(await post(FakeEngine(), CHAT, nested.encode()))


@pytest.mark.parametrize(
    "content",
    [
        b'{"model":"fake/model","prompt":"a\\ud83d b"}',
        b'{"model":"fake/model","prompt":["ok","\\udc00"]}',
        b'{"model":"fake/model","prompt":"Hi","stop":"\\udc00"}',
        b'{"model":"fake/model","prompt":"Hi","user":"\\udc00"}',
        b'{"model":"\\udc00","prompt":"Hi"}',
        b'{"model":"fake/model","prompt":"Hi","logit_bias":{"\\ud83d":1}}',
        b'{"model":"fake/model","prompt":"Hi","\\ud83d":1}',
    ],
)
async def test_half_a_surrogate_pair(content: bytes) -> None:
    error_of(await post(FakeEngine(), COMPLETIONS, content))


@pytest.mark.parametrize(
    "content",
    [
        b'{"model":"fake/model","prompt":"a","prompt":"b"}',
        b'{"model":"fake/model","prompt":"a","pr\\u006fmpt":"a"}',
        b'{"prompt":"a","model":"fake/model","prompt":"b"}',
        b'{"model":"fake/model","prompt":"a","logit_bias":{"7":1,"7":2}}',
    ],
)
async def test_a_field_given_twice(content: bytes) -> None:
    assert "twice" in error_of(await post(FakeEngine(), COMPLETIONS, content))["message"]


async def test_a_field_of_a_message_given_twice() -> None:
    content = b'{"model":"fake/model","messages":[{"role":"user","content":"a","content":"b"}]}'
    assert "'content' is given twice" in error_of(await post(FakeEngine(), CHAT, content))["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"model":"fake/model","prompt":"Hi"}',
        b' \n{ "model"\t: "fake/model" ,\r\n"prompt" : "a\\"b" } \n',
        b'{"mod\\u0065l":"fake/model","prompt":"\\ud83d\\ude00"}',
    ],
)
async def test_odd_json_that_is_fine(content: bytes) -> None:
    response = await post(FakeEngine(), COMPLETIONS, content)
    assert response.status_code == 200, response.text


async def test_the_content_type_does_not_matter() -> None:
    async with client_of(create_app(FakeEngine())) as client:
        for content_type in ("text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"):
            response = await client.post(
                COMPLETIONS, content=json.dumps(body(COMPLETIONS)), headers={"Content-Type": content_type}
            )
            assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["Hi"] * 100_000}),
        (COMPLETIONS, {"prompt": [[1]] * 100_000}),
        (COMPLETIONS, {"prompt": [5] * 1_000_000}),
        (COMPLETIONS, {"stop": [f"zz{i}" for i in range(10_000)]}),
        (COMPLETIONS, {"stop": "ab" * 500_000}),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(100_000)}}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}] * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]}),
    ],
)
async def test_enormous_requests_are_refused_fast(path: str, fields: dict[str, Any]) -> None:
    content = json.dumps(body(path, **fields)).encode()
    begin = time.perf_counter()
    error_of(await post(FakeEngine(), path, content))
    assert time.perf_counter() - begin < 1
