"""Answers in the forms of the API: whole bodies, and chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from microbatch.api.openai.best_of import keep_best
from microbatch.api.openai.frames import Frame
from microbatch.api.openai.logprobs import CompletionLogprobs, chat_logprobs, joined, prompt_logprobs
from microbatch.core.ports import Tokenizer
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.engine.outputs import Choice, ChoiceDelta, RequestOutput, Usage
from microbatch.engine.stream import RequestStream

#: The two ends that a client is told; the others are told as errors.
TOLD = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Renderer(Protocol):
    """Knows one form of answer; an object renders one request. Choice ``j`` of prompt ``i`` has the index i * n + j."""

    @property
    def answer_id(self) -> str:
        """The id in the answer."""
        ...

    def begin(self, streams: Sequence[RequestStream]) -> None:
        """The requests that are rendered, one for each prompt; before anything else."""
        ...

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """The whole answer."""
        ...

    def chunks(self, prompt_index: int, delta: ChoiceDelta) -> list[msgspec.Raw]:
        """What a stream sends for a delta; may be nothing."""
        ...

    def usage_chunk(self, usages: Iterable[Usage]) -> dict[str, object]:
        """The last chunk, when the client asked for the usage."""
        ...


class Envelope:
    """What every body and chunk of one answer shares."""

    def __init__(self, prefix: str, kind: str, model: str, include_usage: bool = False, fingerprint: str = "") -> None:
        self.answer_id = f"{prefix}-{secrets.token_hex(12)}"
        self._kind = kind
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        self._fingerprint = fingerprint or None

    def wrap(self, choices: Iterable[dict[str, object]], kind: str = "", **more: object) -> dict[str, object]:
        """A body around choices."""
        return {
            "id": self.answer_id,
            "object": kind or self._kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": list(choices),
            **more,
        }

    def chunk(self, choice: dict[str, object], kind: str = "") -> msgspec.Raw:
        """A chunk with one choice; with ``include_usage`` all chunks but the last have a null usage."""
        chunk = self.wrap([choice], kind, **({"usage": None} if self._include_usage else {}))
        return msgspec.Raw(msgspec.json.encode(chunk))


class CompletionRenderer:
    """``text_completion``. ``echoes`` are the texts of the prompts, when they are to come first in the answers;
    ``prompt_top`` asks for log-probabilities of the prompt in vLLM's form, with so many alternatives."""

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        params: SamplingParams,
        echoes: Sequence[str] | None = None,
        prompt_top: int | None = None,
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._params = params
        self._echoes = echoes
        self._prompt_top = prompt_top
        self._streams: Sequence[RequestStream] = ()
        self._begun: dict[int, CompletionLogprobs] = {}
        self._frames: dict[int, Frame] = {}

    @property
    def answer_id(self) -> str:
        """``cmpl-...``"""
        return self._envelope.answer_id

    def begin(self, streams: Sequence[RequestStream]) -> None:
        """One request for each prompt."""
        self._streams = streams

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """The whole answer; of more choices than were asked for, the best."""
        kept = [keep_best(output, self._params.n) for output in outputs]
        choices = [self._choice(i, choice) for i, output in enumerate(kept) for choice in output.choices]
        if self._prompt_top is not None:
            for choice in choices:
                stream = self._streams[choice["index"] // self._params.n]
                choice["prompt_logprobs"] = _prompt_logprobs(self._tokenizer, stream, self._prompt_top)
        return self._envelope.wrap(choices, usage=usage_body(output.usage for output in outputs))

    def chunks(self, prompt_index: int, delta: ChoiceDelta) -> list[msgspec.Raw]:
        """One chunk, or none while there is nothing to show."""
        index = prompt_index * self._params.n + delta.index
        begins = index not in self._begun
        if delta.text and not (begins or delta.logprobs or delta.finish_reason):
            return [self._frame(index).fill(delta.text)]
        choice = self._choice(prompt_index, delta)
        if not (choice["text"] or choice["logprobs"] or choice["finish_reason"] or (begins and self._echoes)):
            return []
        return [self._envelope.chunk(choice)]

    def usage_chunk(self, usages: Iterable[Usage]) -> dict[str, object]:
        """The last chunk."""
        return self._envelope.wrap([], usage=usage_body(usages))

    def _frame(self, index: int) -> Frame:
        """The chunk of a choice that goes on, with text alone: nearly all there are."""
        if index not in self._frames:
            choice = {"index": index, "logprobs": None, "finish_reason": None}
            self._frames[index] = Frame(lambda text: self._envelope.chunk({**choice, "text": text}))
        return self._frames[index]

    def _choice(self, prompt_index: int, part: Choice | ChoiceDelta) -> dict[str, Any]:
        index = prompt_index * self._params.n + part.index
        text, entries = part.text, []
        if index not in self._begun:
            self._begun[index] = CompletionLogprobs(self._tokenizer, self._params.logprobs or 0)
            if self._echoes:
                text = self._echoes[prompt_index] + text
                entries += self._prompt_entries(prompt_index, self._begun[index])
        if part.logprobs and self._params.logprobs is not None:
            entries.append(self._begun[index].entries(part.token_ids, part.logprobs))
        return {
            "index": index,
            "text": text,
            "logprobs": joined(entries),
            "finish_reason": TOLD.get(part.finish_reason) if part.finish_reason else None,
        }

    def _prompt_entries(self, prompt_index: int, logprobs: CompletionLogprobs) -> list[dict[str, object]]:
        stream, echoes = self._streams[prompt_index], self._echoes or ()
        scores = stream.prompt_logprobs
        if self._params.logprobs is None or scores is None:
            return []
        return [logprobs.prompt_entries(stream.request.prompt_token_ids, echoes[prompt_index], scores)]


class ChatRenderer:
    """``chat.completion`` and its chunks."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._params = params
        self._streams: Sequence[RequestStream] = ()
        self._begun: set[int] = set()
        self._frames: dict[int, Frame] = {}

    @property
    def answer_id(self) -> str:
        """``chatcmpl-...``"""
        return self._envelope.answer_id

    def begin(self, streams: Sequence[RequestStream]) -> None:
        """The one request."""
        self._streams = streams

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """The whole answer."""
        (output,) = outputs
        choices = [self._choice(choice) for choice in output.choices]
        body = self._envelope.wrap(choices, usage=usage_body([output.usage]))
        if self._params.prompt_logprobs is not None:
            (stream,) = self._streams
            body["prompt_logprobs"] = _prompt_logprobs(self._tokenizer, stream, self._params.prompt_logprobs)
        return body

    def chunks(self, prompt_index: int, delta: ChoiceDelta) -> list[msgspec.Raw]:
        """The role once, then the text, and the end in a chunk of its own."""
        chunks = []
        logprobs = self._logprobs(delta)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        if logprobs:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs))
        elif delta.text:
            chunks.append(self._frame(delta.index).fill(delta.text))
        if delta.finish_reason in TOLD:
            chunks.append(self._chunk(delta.index, {}, finish_reason=TOLD[delta.finish_reason]))
        return chunks

    def usage_chunk(self, usages: Iterable[Usage]) -> dict[str, object]:
        """The last chunk."""
        return self._envelope.wrap([], "chat.completion.chunk", usage=usage_body(usages))

    def _choice(self, choice: Choice) -> dict[str, object]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": TOLD.get(choice.finish_reason),
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: object = None, finish_reason: str | None = None
    ) -> msgspec.Raw:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.chunk(choice, "chat.completion.chunk")

    def _frame(self, index: int) -> Frame:
        """The chunk with text alone: nearly all there are."""
        if index not in self._frames:
            self._frames[index] = Frame(lambda text: self._chunk(index, {"content": text}))
        return self._frames[index]

    def _logprobs(self, part: Choice | ChoiceDelta) -> dict[str, object] | None:
        if self._params.logprobs is None or not part.logprobs:
            return None
        return chat_logprobs(self._tokenizer, part.token_ids, part.logprobs)


def _prompt_logprobs(tokenizer: Tokenizer, stream: RequestStream, top: int) -> list[dict[str, object] | None]:
    return prompt_logprobs(tokenizer, stream.request.prompt_token_ids, stream.prompt_logprobs or (), top)


def usage_body(usages: Iterable[Usage]) -> dict[str, object]:
    """Tokens of all prompts and answers together."""
    usages = list(usages)
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
