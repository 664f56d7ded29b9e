"""Log-probabilities in the two forms of the API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from microbatch.core.plan import TokenLogprobs
from microbatch.core.ports import Tokenizer

#: Stands for minus infinity, which JSON has no number for.
LOWEST = -9999.0


class CompletionLogprobs:
    """Entries of one choice of a completion. Offsets count characters of the choice's text and go on over deltas."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entries(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
        """Entries of the next tokens. The chosen one is among the alternatives even if it is not one of the best."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_text(token_id)[1]))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._best(*pair) for pair in zip(token_ids, logprobs)] if self._top else None,
            "text_offset": offsets,
        }

    def _best(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for other, logprob in (*entry.top, (token_id, entry.logprob)):
            best.setdefault(self._name(other), _finite(logprob))
        return best

    def _name(self, token_id: int) -> str:
        """The token's text; bytes that are no text are spelled out, or different tokens would share a name."""
        text, data = self._tokenizer.token_text(token_id)
        if text.encode("utf-8") == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]
) -> dict[str, object]:
    """Entries of tokens of a chat answer."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, token_id, entry.logprob),
                "top_logprobs": [_chat_entry(tokenizer, other, logprob) for other, logprob in entry.top],
            }
            for token_id, entry in zip(token_ids, logprobs)
        ],
        "refusal": None,
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    text, data = tokenizer.token_text(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
