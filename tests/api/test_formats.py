"""Forms of answers over HTTP: what is asked for reaches the engine, what cannot be is refused with field and place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microbatch.core.structured import StructuredOutput
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, CHAT, error_of, post

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


def by_name(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "fields, form",
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        ({"response_format": by_name(strict=True, description="d")}, StructuredOutput("json_schema", TEXT)),
        ({"response_format": by_name(strict=False)}, StructuredOutput("json_schema", TEXT)),
        ({"response_format": by_name(schema=None)}, StructuredOutput("json_object")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, StructuredOutput("json_schema", TEXT)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput("grammar", 'start: "a"')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", '["a", "b"]')),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, StructuredOutput("regex", "a")),
    ],
)
async def test_a_form_reaches_the_engine(path: str, fields: dict[str, Any], form: StructuredOutput | None) -> None:
    engine = FakeEngine()
    assert (await post(engine, path, **fields)).status_code == 200
    assert engine.requests[0].params.structured_output == form


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "fields, param, said",
    [
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give one of them",
        ),
        ({"response_format": by_name(schema={"not": {}})}, "response_format", "Unimplemented keys"),
        (
            {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "x"}}}}},
            "structured_outputs",
            "$.properties.a",
        ),
        ({"structured_outputs": {"regex": "a", "xml": "b"}}, "structured_outputs", "unknown field 'xml'"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "cannot be combined"),
    ],
)
async def test_a_form_that_cannot_be_is_refused(path: str, fields: dict[str, Any], param: str, said: str) -> None:
    engine = FakeEngine()
    error = error_of(await post(engine, path, stream=True, **fields))
    assert error["param"] == param and said in error["message"] and not engine.requests


async def test_a_key_given_twice_in_a_form_is_refused() -> None:
    content = b'{"messages":[{"role":"user","content":"x"}],"structured_outputs":{"regex":"a","regex":"b"}}'
    assert "given twice" in error_of(await post(FakeEngine(), CHAT, content))["message"]


async def test_a_schema_of_a_tool_that_cannot_be_is_an_error_of_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    error = error_of(await post(FakeEngine(), CHAT, tools=[tool], tool_choice="required"))
    assert error["param"] == "tools" and "Unimplemented keys" in error["message"]
