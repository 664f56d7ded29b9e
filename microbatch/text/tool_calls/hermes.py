"""The form of Hermes, Qwen and many others: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from microbatch.text.tool_calls.json_calls import JsonCallParser

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(JsonCallParser):
    """One object in each pair of markers; the last marker may be missing."""

    special = (BEGIN, END)
    markers = (BEGIN,)

    def _marked(self) -> bool:
        return self._open(len(BEGIN))

    def _closed(self) -> bool:
        rest = self._text.lstrip()
        if not rest.startswith(END):
            if END.startswith(rest) and not self._ended:
                return False
        else:
            self._text = rest[len(END) :]
        self._step = self._content
        return True
