"""A request body as a typed value, or a 400 that says what is wrong with it and where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from microbatch.api.errors import MAX_ECHO, quote
from microbatch.errors import InvalidRequestError, UnsupportedError

T = TypeVar("T", bound=msgspec.Struct)

#: Fields whose objects a client could fill with two values for one key. Prompts have none.
_NESTED: Final = (
    "messages",
    "logit_bias",
    "stream_options",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
)
_BOM: Final = b"\xef\xbb\xbf"
_PATH: Final = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_KEY: Final = re.compile(rb'\s*[{,]\s*("(?:[^"\\]+|\\.)*")\s*:\s*', re.DOTALL)


def parse_body(body: bytes, kind: type[T], unsupported: Mapping[str, tuple[object, ...]]) -> T:
    """Read strict JSON into ``kind``. Raises ``InvalidRequestError``.

    A field that ``kind`` does not have is refused by name unless it is null: as unsupported when the API knows it
    (``unsupported`` maps it to the values that ask for nothing), else as unknown. A key given twice is refused.
    """
    body = body.removeprefix(_BOM)
    fields: dict[str, msgspec.Raw] = _decode(body, dict[str, msgspec.Raw])
    _refuse_other_fields(fields, kind, unsupported)
    _refuse_repeated_fields(body, fields)
    value: T = _decode(body, kind)
    for name in _NESTED:
        if name in fields:
            _refuse_repeated_keys(name, bytes(fields[name]))
    return value


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequestError(f"the body is not valid JSON: {reason}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is not valid JSON: nested too deeply") from error


def _explain(message: str) -> InvalidRequestError:
    """The error of msgspec, with the place as ``param``."""
    match = _PATH.fullmatch(message)
    assert match is not None
    what, path = match["what"].replace("`", "'"), (match["path"] or "").replace("[...]", "")
    what = what[:1].lower() + what[1:]
    if field := re.search("(missing required|contains unknown) field '(.*)'", what, re.DOTALL):
        name = f"{path}.{field[2]}"[-MAX_ECHO:].removeprefix(".")
        if field[1] == "missing required":
            return InvalidRequestError(f"{name} is missing", param=name)
        return InvalidRequestError(f"unknown field {quote(name)}", param=name, code="unknown_parameter")
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {what}")
    return InvalidRequestError(f"{path[:MAX_ECHO]}: {what}", param=path[:MAX_ECHO])


def _refuse_other_fields(
    fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct], unsupported: Mapping[str, tuple[object, ...]]
) -> None:
    known = set(kind.__struct_fields__)
    for name, value in fields.items():
        raw = bytes(value)
        if name in known or raw == b"null":
            continue
        if name not in unsupported:
            raise InvalidRequestError(f"unknown field {quote(name)}", param=name[:MAX_ECHO], code="unknown_parameter")
        if _decode(raw, object) not in unsupported[name]:
            raise UnsupportedError(f"{name} is not supported by this server", param=name)


def _refuse_repeated_fields(body: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """A decoded object keeps the last of two equal keys: walk over the text and see whether something else is in it."""
    position = 0
    for name, raw in fields.items():
        key, value = _KEY.match(body, position), bytes(raw)
        if key is None or msgspec.json.decode(key[1]) != name or not body.startswith(value, key.end()):
            raise InvalidRequestError("the body has a field twice")
        position = key.end() + len(value)
    if fields and body[position:].strip() != b"}":
        raise InvalidRequestError("the body has a field twice")


def _refuse_repeated_keys(field: str, raw: bytes) -> None:
    """The same for the objects inside one field."""
    try:
        json.loads(raw, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:  # what this reader cannot take and the other one can
        raise InvalidRequestError(f"{field}: not valid JSON: {error}", param=field) from error


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"the field {quote(twice)} is given twice in one object")
    return value
