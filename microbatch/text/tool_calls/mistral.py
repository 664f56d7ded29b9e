"""The forms of Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``, and since 2025
``[TOOL_CALLS]f[ARGS]{...}`` for each call."""

from __future__ import annotations

import re
import secrets
import string
from typing import Final

from microbatch.text.tool_calls.json_calls import JsonCallParser
from microbatch.text.tool_calls.scanning import ObjectScanner

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_NAMED: Final = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\]([A-Za-z0-9]{1,64}))?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED: Final = re.compile(
    r"\s*(?:[A-Za-z0-9_.-]{1,64}(?:\[[A-Z_]{0,7}(?:\][A-Za-z0-9]{0,64}(?:\[[A-Z_]{0,7}\]?)?)?)?\s*)?"
)
_LIST: Final = re.compile(r"\s*\[(?![A-Z])\s*(?=\S)")
_LETTERS: Final = string.ascii_letters + string.digits


class MistralParser(JsonCallParser):
    """Either form behind each marker. The chat templates take ids of nine letters and digits only."""

    special = (BEGIN, ARGUMENTS, CALL_ID)
    markers = (BEGIN,)

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def _marked(self) -> bool:
        named = _NAMED.match(self._text, len(BEGIN))
        if named is not None:
            self._begin(named[1], named[2] or "")
            self._take(named.end())
            self._scanner, self._step = ObjectScanner(), self._named_arguments
            return True
        listed = _LIST.match(self._text, len(BEGIN))
        if listed is not None:
            return self._open(listed.end())
        rest = self._text[len(BEGIN) :]
        possible = _MAY_BE_NAMED.fullmatch(rest) or rest.strip() == "["
        return self._wait() if possible else self._refuse(len(BEGIN))

    def _named_arguments(self) -> bool:
        ends = self._more_arguments()
        if ends:
            self._step = self._content
        return ends

    def _closed(self) -> bool:
        """Behind a call of a list: another one, or its end."""
        rest = self._text.lstrip()
        if not rest and not self._ended:
            return False
        if rest.startswith(","):
            return self._open(len(self._text) - len(rest) + 1)
        if rest.startswith("]"):
            self._text = rest[1:]
        self._step = self._content
        return True
