"""Chat answers with parts: content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from microbatch.api.openai.answer_form import AnswerForm, AnswerReader
from microbatch.api.openai.render import TOLD, ChatRenderer, Envelope
from microbatch.core.plan import TokenLogprobs
from microbatch.core.ports import Tokenizer
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.engine.outputs import Choice, ChoiceDelta
from microbatch.text.tool_calls.events import Arguments, CallBegins, Content, Event, Reasoning


class PartsRenderer(ChatRenderer):
    """``chat.completion`` and its chunks, read by a parser."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, params: SamplingParams, form: AnswerForm) -> None:
        super().__init__(envelope, tokenizer, params)
        self._form = form
        self._parts = [_Stream(form) for _ in range(params.n)]

    def chunks(self, prompt_index: int, delta: ChoiceDelta) -> list[msgspec.Raw]:
        """The role once, then the parts, and the end in a chunk of its own. Log-probabilities go with the first part
        that comes with or after their tokens."""
        stream, ends = self._parts[delta.index], delta.finish_reason in TOLD
        events = stream.read(delta)
        if not events and not ends:
            return []
        logprobs = self._logprobs(stream.take_logprobs(delta.index))
        chunks = []
        if not stream.begun:
            stream.begun = True
            empty = None if self._form.use.forced or (events and not isinstance(events[0], Content)) else ""
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": empty}))
        pieces = [_piece(event) for event in events] or ([{}] if logprobs else [])
        for number, piece in enumerate(pieces):
            chunks.append(self._chunk(delta.index, piece, None if number else logprobs))
        if delta.finish_reason in TOLD:
            chunks.append(self._chunk(delta.index, {}, finish_reason=_told(delta.finish_reason, stream.called)))
        return chunks

    def _choice(self, choice: Choice) -> dict[str, object]:
        reader = AnswerReader(self._form)
        events = [*reader.push(choice.text), *reader.finish()]
        message = _message(events, self._form.use.forced)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": _told(choice.finish_reason, "tool_calls" in message),
        }


class _Stream:
    """One choice while it is streamed: its reader, and the tokens that no chunk has told of yet."""

    def __init__(self, form: AnswerForm) -> None:
        self._reader = AnswerReader(form)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.begun = False
        self.called = False

    def read(self, delta: ChoiceDelta) -> list[Event]:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        events = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        self.called = self.called or any(isinstance(event, CallBegins) for event in events)
        return events

    def take_logprobs(self, index: int) -> ChoiceDelta:
        taken = ChoiceDelta(index, "", tuple(self._token_ids), tuple(self._logprobs) or None)
        self._token_ids.clear()
        self._logprobs.clear()
        return taken


def _told(reason: FinishReason, called: bool) -> str | None:
    return "tool_calls" if called and reason is FinishReason.STOP else TOLD.get(reason)


def _piece(event: Event) -> dict[str, Any]:
    """An event as the delta of a chunk."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallBegins(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(events: Sequence[Event], forced: bool) -> dict[str, Any]:
    """The whole message: no content is null when there is something else, as in a stream."""
    content, reasoning = _joined(events, Content), _joined(events, Reasoning)
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegins):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.call_id, "type": "function", "function": function})
        elif isinstance(event, Arguments):
            calls[event.index]["function"]["arguments"] += event.text
    empty = None if events or forced else ""
    message: dict[str, Any] = {"role": "assistant", "content": content or empty, "refusal": None}
    if reasoning:
        message.update(reasoning=reasoning, reasoning_content=reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined(events: Iterable[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])
