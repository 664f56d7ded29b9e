"""The forms of Llama 3: an answer that is ``{"name": "f", "parameters": {...}}``, several of them with ``;`` between,
and the same behind the token ``<|python_tag|>``."""

from __future__ import annotations

from microbatch.text.tool_calls.json_calls import JsonCallParser

TAG = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    """Without the tag an object is a call only at the beginning of the answer or behind another call, and only with the
    name of a tool: all else is an answer in JSON."""

    special = (TAG,)
    markers = (TAG,)

    def _first(self) -> bool:
        rest = self._text.lstrip()
        if not rest and not self._ended:
            return False
        if rest.startswith("{"):
            return self._open(0, known_only=True)
        self._step = self._content
        return True

    def _marked(self) -> bool:
        return self._open(len(TAG))

    def _closed(self) -> bool:
        """Another call may follow; a separator before anything else is text."""
        rest = self._text.lstrip()
        begin = len(self._text) - len(rest)
        if rest.startswith(";"):
            behind = rest[1:].lstrip()
            if not behind and not self._ended:
                return False
            begin, rest = len(self._text) - len(behind), behind
        if not rest and not self._ended:
            return False
        if rest.startswith("{"):
            return self._open(begin, known_only=True)
        if rest.startswith(TAG):
            self._take(begin)
        elif TAG.startswith(rest) and rest and not self._ended:
            return False
        self._step = self._content
        return True
