"""Log-probabilities in the two forms of the API, and those of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from microbatch.core.plan import TokenLogprobs
from microbatch.core.ports import Tokenizer

#: Stands for minus infinity, which JSON has no number for.
LOWEST = -9999.0


class CompletionLogprobs:
    """Entries of one choice of a completion. Offsets count characters of the choice's text and go on over deltas; a
    character that has several tokens begins with the first of them."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._detokenizer = tokenizer.detokenizer()

    def prompt_entries(
        self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, object]:
        """Entries of an echoed prompt, whose ``text`` is the client's own: its first token follows nothing and so has
        no log-probability. A special token takes room only where the text spells it out."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset = min(self._offset + self._width(token_id, text), len(text))
        self._offset, self._detokenizer = len(text), self._tokenizer.detokenizer()
        best = [self._best(*pair) for pair in zip(token_ids[1:], logprobs)]
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(_finite(entry.logprob) for entry in logprobs)],
            "top_logprobs": [None, *best] if self._top else None,
            "text_offset": offsets,
        }

    def _width(self, token_id: int, text: str) -> int:
        """Characters of the echoed text that end with this token."""
        piece = self._detokenizer.push(token_id)
        name, data = self._tokenizer.token_text(token_id)
        if not piece and name.encode("utf-8") == data and text.startswith(name, self._offset):
            return len(name)
        while piece.startswith(" ") and not text.startswith(piece, self._offset):
            piece = piece[1:]  # a marker that the tokenizer sets behind special tokens
        return len(piece)

    def entries(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
        """Entries of the next tokens. The chosen one is among the alternatives even if it is not one of the best."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._best(*pair) for pair in zip(token_ids, logprobs)] if self._top else None,
            "text_offset": offsets,
        }

    def _best(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for other, logprob in (*entry.top[: self._top], (token_id, entry.logprob)):
            best.setdefault(self._name(other), _finite(logprob))
        return best

    def _name(self, token_id: int) -> str:
        """The token's text; bytes that are no text are spelled out, or different tokens would share a name."""
        text, data = self._tokenizer.token_text(token_id)
        if text.encode("utf-8") == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(parts: Sequence[dict[str, object]]) -> dict[str, object] | None:
    """Entries end to end; None when there are none."""
    if not parts:
        return None
    lists: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items():
            if isinstance(values, list):
                lists.setdefault(name, []).extend(values)
    return {name: lists.get(name) for name in parts[0]}


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[dict[str, object] | None]:
    """vLLM's form: null for the first token of the prompt, then by token id the ``top`` best and the token itself."""
    entries: list[dict[str, object] | None] = [None]
    for token_id, entry in zip(token_ids[1:], logprobs):
        ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:top], 1)}
        ranked[token_id] = (entry.logprob, entry.rank)
        entries.append({str(other): _ranked(tokenizer, other, *values) for other, values in ranked.items()})
    return entries


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, object]:
    text = tokenizer.token_text(token_id)[0]
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}


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
