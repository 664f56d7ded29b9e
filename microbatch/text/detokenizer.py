"""Text of one sequence while it grows: whole characters only, cut before a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch.text.joining import Joiner
from microbatch.text.stops import StopFilter


class IncrementalDetokenizer:
    """A ``core.ports.Detokenizer``: the pieces joined are the text of all tokens, up to the earliest stop text.

    The bytes of an unfinished character and text that may begin a stop are held back. With a sentencepiece tokenizer a
    whole character is given out even when broken bytes follow it directly; decoding such a run of bytes in one go would
    turn the whole run into U+FFFD.
    """

    def __init__(self, joiner: Joiner, stop: Sequence[str] = ()) -> None:
        self._join = joiner.push
        self._joiner = joiner
        self._filter = StopFilter(stop) if stop else None
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found; the text before it has been given out in full."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; may be empty."""
        if self._filter is None:
            return self._join(token_id)
        if self._stopped:
            return ""
        return self._filtered(self._filter, self._join(token_id))

    def finish(self) -> str:
        """The rest of the text: the sequence ends by itself."""
        if self._filter is None:
            return self._joiner.finish()
        if self._stopped:
            return ""
        text = self._filtered(self._filter, self._joiner.finish()) + self._filter.finish()
        self._stopped = self._filter.stopped
        return text

    def _filtered(self, stops: StopFilter, text: str) -> str:
        text = stops.push(text)
        self._stopped = stops.stopped
        return text
