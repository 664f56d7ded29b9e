"""The form that a request wants its answer to have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from microbatch.api.errors import quote
from microbatch.api.openai.schema import SamplingFields
from microbatch.api.ports import ServingEngine
from microbatch.core.request import SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError

#: Fields of ``structured_outputs``, each of which is a form of its own.
_KINDS: Final = ("json", "json_object", "regex", "grammar", "choice")


def read_format(body: SamplingFields) -> StructuredOutput | None:
    """What ``response_format`` or ``structured_outputs`` asks for; None for any text.

    A ``json_schema`` is kept to whether it says ``strict`` or not. Raises ``InvalidRequestError`` for a malformed
    value; whether a schema or grammar can be used is for ``check_form`` to say.
    """
    by_format = _read_response_format(body.response_format) if body.response_format is not None else None
    by_field = _read_structured_outputs(body.structured_outputs) if body.structured_outputs is not None else None
    if by_format is not None and by_field is not None:
        raise _error("structured_outputs", "cannot be combined with response_format: give one of them")
    return by_format or by_field


async def check_form(engine: ServingEngine, params: SamplingParams, body: SamplingFields) -> None:
    """Get the form of an answer ready. Raises ``InvalidRequestError`` that names the field and the place in it."""
    form = params.structured_output
    if form is None:
        return
    try:
        await engine.check_form(form)
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        error.param = (
            "response_format"
            if body.response_format is not None and read_format(body) == form
            else "structured_outputs" if body.structured_outputs is not None else "tools"
        )
        raise


def _read_response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    kind, where = value.get("type"), "response_format"
    _check_fields(value, ("type", "json_schema") if kind == "json_schema" else ("type",), where)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    if kind != "json_schema":
        raise _error(where, f"type must be 'text', 'json_object' or 'json_schema', got {quote(str(kind))}")
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise _error(where, "json_schema must be an object with a name")
    _check_fields(named, ("name", "description", "schema", "strict"), f"{where}.json_schema")
    if not isinstance(named.get("strict") or False, bool):
        raise _error(where, "json_schema.strict must be true or false")
    if named.get("schema") is None:
        return StructuredOutput("json_object")
    return _of_schema(named["schema"], where, "json_schema.schema must be an object")


def _read_structured_outputs(value: Mapping[str, Any]) -> StructuredOutput:
    where = "structured_outputs"
    _check_fields(value, _KINDS, where)
    given = {kind: what for kind, what in value.items() if what is not None and what is not False}
    if len(given) != 1:
        raise _error(where, f"give exactly one of {', '.join(_KINDS)}")
    ((kind, what),) = given.items()
    if kind == "json":
        return _of_schema(what, where, "json must be a schema: an object, or its text")
    if kind == "json_object":
        if what is not True:
            raise _error(where, "json_object must be true or false")
        return StructuredOutput("json_object")
    if kind == "choice":
        if not isinstance(what, list):
            raise _error(where, "choice must be a list of texts")
        return StructuredOutput("choice", json.dumps(what))
    if not isinstance(what, str) or not what:
        raise _error(where, f"{kind} must be a text, and not empty")
    return StructuredOutput("regex", what) if kind == "regex" else StructuredOutput("grammar", what)


def _of_schema(schema: object, where: str, otherwise: str) -> StructuredOutput:
    if isinstance(schema, str) and schema and where == "structured_outputs":
        return StructuredOutput("json_schema", schema)
    if not isinstance(schema, dict):
        raise _error(where, otherwise)
    return StructuredOutput("json_schema", json.dumps(schema))


def _check_fields(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, what in value.items():
        if name not in known and what is not None:
            raise InvalidRequestError(
                f"{where}: unknown field {quote(name)}", param=where.partition(".")[0], code="unknown_parameter"
            )


def _error(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {message}", param=where)
