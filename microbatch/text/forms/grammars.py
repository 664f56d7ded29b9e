"""The form of an answer as a grammar of llguidance, or an error that says what is wrong with it and where.

The library refuses what it cannot enforce, keywords of JSON schema among it, instead of leaving it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from microbatch.core.structured import StructuredOutput
from microbatch.errors import InvalidRequestError

MAX_TEXT: Final = 64 * 1024
MAX_DEPTH: Final = 64
MAX_CHOICES: Final = 1024
#: As ``json.dumps`` writes it, which models have read most; free white space lets a small model fill answers with it.
_WHITE_SPACE: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Where a schema holds other schemas: one, a list of them, or an object of them.
_ONE: Final = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_LISTS: Final = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions")

#: What is wrong with a grammar of the library, or "".
Validate = Callable[[str], str]


def grammar_of(form: StructuredOutput, validate: Validate) -> str:
    """The grammar of a form. Raises ``InvalidRequestError`` without ``param``: the caller knows the field."""
    if len(form.text) > MAX_TEXT:
        raise InvalidRequestError(f"the {_NAMES[form.kind]} is over the limit of {MAX_TEXT} characters")
    return _MAKERS[form.kind](form.text, validate)


def _of_object(text: str, validate: Validate) -> str:
    return _schema_grammar({"type": "object"})


def _of_schema(text: str, validate: Validate) -> str:
    schema = _read_json(text, "schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError("the schema must be an object")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    grammar = _schema_grammar(schema)
    if problem := validate(grammar):
        path, problem = _place(schema, schema, problem, "$", validate)
        raise InvalidRequestError(f"the schema at {path}: {_first_line(problem)}")
    return grammar


def _of_regex(text: str, validate: Validate) -> str:
    grammar: str = LLMatcher.grammar_from_regex(text)
    if problem := validate(grammar):
        reason = re.search(r"error: (.*)|lookarounds? [^\n]*", problem)
        caret = re.search(r"\n    ( *)\^", problem)
        where = f" at character {len(caret[1])}" if caret else ""
        raise InvalidRequestError(f"the regex{where}: {(reason[1] or reason[0]) if reason else _first_line(problem)}")
    return grammar


def _of_grammar(text: str, validate: Validate) -> str:
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except GbnfToLarkError as error:
            raise InvalidRequestError(f"the grammar is not valid GBNF: {_first_line(str(error))}") from error
    grammar: str = LLMatcher.grammar_from_lark(text)
    if problem := validate(grammar):
        raise InvalidRequestError(f"the grammar: {_first_line(problem)}")
    return grammar


def _of_choice(text: str, validate: Validate) -> str:
    choices = _read_json(text, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequestError("choice must be a list of texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"choice takes at most {MAX_CHOICES} texts, got {len(choices)}")
    grammar: str = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    if problem := validate(grammar):
        raise InvalidRequestError(f"choice: {_first_line(problem)}")
    return grammar


_MAKERS: Final[Mapping[str, Callable[[str, Validate], str]]] = {
    "json_object": _of_object,
    "json_schema": _of_schema,
    "regex": _of_regex,
    "grammar": _of_grammar,
    "choice": _of_choice,
}
_NAMES: Final = {**{kind: kind for kind in _MAKERS}, "json_schema": "schema"}


def _schema_grammar(schema: Mapping[str, Any]) -> str:
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WHITE_SPACE)
    return grammar


def _place(
    root: Mapping[str, Any], schema: Mapping[str, Any], problem: str, path: str, validate: Validate
) -> tuple[str, str]:
    """The innermost schema that is wrong by itself, the definitions of the whole one at hand, and what is wrong."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    for key, part in _parts(schema):
        alone = part if key.startswith((".$defs", ".definitions")) else {**shared, **part}
        if found := validate(_schema_grammar(alone)):
            return _place(root, part, found, path + key, validate)
    return path, problem


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _ONE:
        if isinstance(schema.get(name), dict):
            yield f".{name}", schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f".{name}[{i}]", part) for i, part in enumerate(schema[name]) if isinstance(part, dict))
    for name in _OBJECTS:
        if isinstance(schema.get(name), dict):
            yield from ((f".{name}.{key}", part) for key, part in schema[name].items() if isinstance(part, dict))


def _read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the {what} is not valid JSON: {error}") from error


def _depth(value: Any) -> int:
    """How deep lists and objects are nested; the reader of JSON has its own, larger bound."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return depth


def _first_line(problem: str) -> str:
    return problem.partition("\n")[0].strip()
