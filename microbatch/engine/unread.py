"""What one choice has to say that its reader has not taken yet."""

from __future__ import annotations

from microbatch.core.plan import TokenLogprobs
from microbatch.core.request import FinishReason
from microbatch.engine.outputs import ChoiceDelta


class Unread:
    """Grows token by token and is taken as one ``ChoiceDelta``, so what a token costs does not depend on the reader.

    ``in_line``: whether the stream has it in the line of choices to be read next.
    """

    __slots__ = ("index", "text", "token_ids", "logprobs", "finish_reason", "in_line")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.in_line = False

    def add(self, text: str, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One more token, and the text that it has made certain."""
        self.text.append(text)
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def take(self) -> ChoiceDelta:
        """Everything since the last call."""
        delta = ChoiceDelta(
            self.index,
            "".join(self.text),
            tuple(self.token_ids),
            tuple(self.logprobs) or None,
            self.finish_reason,
        )
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.in_line = False
        return delta
