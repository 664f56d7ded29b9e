"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``, in any order of their keys."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Final

from microbatch.text.tool_calls.marked import MarkedParser
from microbatch.text.tool_calls.scanning import ObjectScanner

#: The usual order of keys: the arguments can be told while they are written.
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OPEN: Final = re.compile(r"\s*\{")
_FIRST_KEY: Final = re.compile(r'\s*\{\s*(?:[^"\s]|"(?!(?:name|arguments|parameters|type|id|function)")[^"]*")')
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON) of a whole object; None when it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    if isinstance(arguments, str):
        return (name, arguments) if _is_object(arguments) else None
    if arguments is None:
        return name, "{}"
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class JsonCallParser(MarkedParser):
    """Adds the steps that read such an object. ``_open`` it with the length of what stands before it and is to be
    shown with it when it is no call; ``_closed`` is where it goes on behind one."""

    def __init__(self, names: Collection[str] = (), make_id: Callable[[], str] | None = None) -> None:
        super().__init__(names, make_id)
        self._opening = 0
        self._known_only = False
        self._scanner = ObjectScanner()
        self._scanned = 0

    def _open(self, opening: int, known_only: bool = False) -> bool:
        """Read an object behind ``opening`` characters. ``known_only``: one that nothing but its form tells from
        content is a call only with the name of a tool."""
        self._opening, self._known_only = opening, known_only
        self._scanner, self._scanned = ObjectScanner(), opening
        self._step = self._head
        return True

    @abstractmethod
    def _closed(self) -> bool:
        """Behind a call."""

    def _head(self) -> bool:
        match = _HEAD.match(self._text, self._opening)
        if match is not None:
            if self._known_only and match[1] not in self._names:
                return self._refuse(match.end())
            self._begin(match[1])
            self._take(match.end())
            self._scanner, self._step = ObjectScanner(), self._arguments
            return True
        if _FIRST_KEY.match(self._text, self._opening):
            return self._refuse(self._opening)
        return self._whole()

    def _whole(self) -> bool:
        """Not the usual order: nothing is certain before the end of the object."""
        if not _OPEN.match(self._text, self._opening):
            blank = not self._text[self._opening :].strip()
            return self._wait() if blank else self._refuse(self._opening)
        self._scanned, ends = self._scanner.scan(self._text, self._scanned)
        if not ends:
            return self._wait()
        call = None if self._scanner.broken else read_call(self._text[self._opening : self._scanned])
        if call is None or (self._known_only and call[0] not in self._names):
            return self._refuse(self._scanned)
        self._take(self._scanned)
        self._begin(call[0])
        self._argue(call[1])
        self._step = self._closed
        return True

    def _arguments(self) -> bool:
        ends = self._more_arguments()
        if ends:
            self._step = self._closed if self._scanner.broken else self._rest
            self._scanner = ObjectScanner(open_brackets=1)
        return ends

    def _more_arguments(self) -> bool:
        """Tell what has come of the arguments; whether they end there."""
        read, ends = self._scanner.scan(self._text)
        if self._ended and not ends:
            read = len(self._text)
        self._argue(self._take(read))
        return ends

    def _rest(self) -> bool:
        """Other keys behind the arguments, and the end of the object."""
        read, ends = self._scanner.scan(self._text)
        self._take(read)
        if ends:
            self._step = self._closed
        return ends
