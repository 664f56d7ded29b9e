"""The embedded model held to forms: every answer is of its form, and nobody else's answer changes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from microbatch import Engine, SamplingParams
from microbatch.core.request import FinishReason
from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": -500, "maximum": 500}
FORMS = {
    "person": StructuredOutput("json_schema", json.dumps(PERSON)),
    "number": StructuredOutput("json_schema", json.dumps(NUMBER)),
    "date": StructuredOutput("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d"),
    "choice": StructuredOutput("choice", '["positive", "negative", "neutral"]'),
    "grammar": StructuredOutput("grammar", 'start: "SELECT " col ("," col)* " FROM t"\ncol: "a" | "b" | "c"'),
}
PROMPT = "The weather report of today says that"


def check(name: str, text: str) -> None:
    """The answer is of its form, whole."""
    if name in ("person", "number"):
        jsonschema.validate(json.loads(text), PERSON if name == "person" else NUMBER)
    elif name == "date":
        assert re.fullmatch(FORMS["date"].text, text)
    elif name == "choice":
        assert text in json.loads(FORMS["choice"].text)
    else:
        assert re.fullmatch("SELECT [abc](,[abc])* FROM t", text)


@pytest.mark.parametrize("policy", ["window", "continuous"])
async def test_answers_of_a_mixed_batch_keep_to_their_forms_and_equal_those_alone(
    policy: str, embedded_model: Path
) -> None:
    free = SamplingParams(max_tokens=40, temperature=0.9, seed=5)
    wanted: list[tuple[str, SamplingParams]] = []
    for name, form in FORMS.items():
        wanted += [(name, replace(free, structured_output=form)), ("", replace(free, seed=len(wanted)))]
    async with Engine(str(embedded_model), policy=policy, dtype="float32", max_batch_size=16) as engine:
        alone = [await engine.generate(PROMPT, params) for _, params in wanted]
        together = await asyncio.gather(*[engine.generate(PROMPT, params) for _, params in wanted])
        for (name, _), one, other in zip(wanted, alone, together, strict=True):
            assert one.token_ids == other.token_ids, name
            if name and one.finish_reason is FinishReason.STOP:
                check(name, one.text)
        ended = {name for (name, _), out in zip(wanted, alone) if out.finish_reason is FinishReason.STOP}
        assert {"number", "date", "choice", "person"} <= ended


async def test_choices_and_streams_and_little_memory_change_no_answer(embedded_model: Path) -> None:
    """Choices of one request have each their own place in the form; under a small store sequences are preempted and
    come again in the middle of it."""
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=5, n=3, structured_output=FORMS["person"])
    settings: dict[str, Any] = dict(policy="continuous", dtype="float32", block_size=4)
    async with Engine(str(embedded_model), **settings) as engine:
        calm = await engine.generate(PROMPT, params)
        pieces: dict[int, str] = {}
        async for delta in engine.stream(PROMPT, params):
            pieces[delta.index] = pieces.get(delta.index, "") + delta.text
    assert [pieces[choice.index] for choice in calm.choices] == [choice.text for choice in calm.choices]
    async with Engine(str(embedded_model), kv_blocks=30, **settings) as engine:
        pressed = await asyncio.gather(*[engine.generate(PROMPT, params) for _ in range(3)])
        preemptions = engine.parts.loop.core.scheduler.counters.num_preemptions
    assert preemptions > 0
    for out in pressed:
        assert [choice.token_ids for choice in out.choices] == [choice.token_ids for choice in calm.choices]
    for choice in calm.choices:
        if choice.finish_reason is FinishReason.STOP:
            check("person", choice.text)


async def test_a_form_that_cannot_be_is_refused_before_anything_runs(embedded_model: Path) -> None:
    wrong = SamplingParams(structured_output=StructuredOutput("json_schema", '{"type": "objekt"}'))
    async with Engine(str(embedded_model)) as engine:
        with pytest.raises(InvalidRequestError, match="Invalid type: objekt"):
            await engine.generate(PROMPT, wrong)
        with pytest.raises(InvalidRequestError, match="Invalid type: objekt"):
            engine.submit([1, 2, 3], wrong)
        assert engine.statistics().num_running == engine.statistics().num_waiting == 0
