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
from microbatch.text.forms.bounds import check_bounds

MAX_TEXT: Final = 64 * 1024
#: Characters that are compiled to find the place of an error, about half a second.
MAX_SEARCHED: Final = 8 * 1024 * 1024
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
    check_bounds(schema)
    grammar = _schema_grammar(schema)
    if problem := validate(grammar):
        path, problem = _place(schema, problem, validate)
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
        except (GbnfToLarkError, RecursionError) as error:
            raise InvalidRequestError(f"the grammar is not valid GBNF: {_first_line(str(error))}") from error
    if text.lstrip().startswith("{"):  # grammars of the library itself, which go around our bounds
        raise InvalidRequestError("the grammar must be in the Lark dialect of llguidance or in GBNF")
    _check_schemas_in(text)
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
    # One terminal, so that thousands of choices are one thing to follow.
    grammar: str = LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
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


def _check_schemas_in(grammar: str) -> None:
    """The bounds of schemas for those inside a grammar; what is no JSON is left to the library, which says where."""
    for match in re.finditer(r"%json(?:\s|(?://|#)[^\n]*)*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue
        check_bounds(schema)


def _schema_grammar(schema: Mapping[str, Any]) -> str:
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WHITE_SPACE)
    except ValueError as error:  # what Python takes for JSON and the library does not: NaN, half of a surrogate pair
        raise InvalidRequestError(f"the schema is not valid JSON: {error}") from error
    return grammar


def _place(root: Mapping[str, Any], problem: str, validate: Validate) -> tuple[str, str]:
    """The innermost schema that is wrong by itself, the definitions of the whole one at hand, and what is wrong."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    path, parts, left = "$", _parts(root), MAX_SEARCHED
    while left > 0 and (found := next(parts, None)) is not None:
        key, part = found
        grammar = _schema_grammar(part if key.startswith((".$defs", ".definitions")) else {**shared, **part})
        left -= len(grammar)
        if wrong := validate(grammar):
            path, parts, problem = path + key, _parts(part), wrong
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
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the {what} is not valid JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has a key twice")
    return value


def _first_line(problem: str) -> str:
    return problem.partition("\n")[0].strip()
