"""An engine without a model: scripted answers over the real streams, tokenizer and errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from microbatch.core import sequence
from microbatch.core.chat import ChatOptions
from microbatch.core.plan import Delta, TokenLogprobs
from microbatch.core.ports import Tokenizer
from microbatch.core.request import FinishReason, Request, SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.engine.stats import EngineStatistics, EngineStatus, Observer
from microbatch.engine.stream import RequestStream
from microbatch.errors import ContextLengthError, MicrobatchError, UnavailableError
from microbatch.executor.fake import prompt_scores
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.text.forms.matching import GuidedForms
from microbatch.text.forms.vocabularies import of_tokens

_FORMS = GuidedForms(lambda: of_tokens(ByteTokenizer()))


@dataclass
class Script:
    """How one request runs: the bytes of ``text`` one after the other (cut by max_tokens), then its end.

    ``hold`` stops before the end until the request is aborted; ``error`` ends it in place of ``finish``.
    """

    text: bytes = b"Hello"
    finish: FinishReason = FinishReason.STOP
    error: Exception | None = None
    hold: bool = False
    cached_tokens: int = 0


@dataclass
class FakeEngine:
    """Meets ``microbatch.api.ports.ServingEngine``. Scripts are used up in order of submission, then the default."""

    default: Script = field(default_factory=Script)
    scripts: deque[Script] = field(default_factory=deque)
    refusals: deque[MicrobatchError | None] = field(default_factory=deque)
    status: EngineStatus = EngineStatus("ready")
    model_name: str = "fake/model"
    fingerprint: str = "fp_fake"
    max_model_len: int = 512
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    requests: list[Request] = field(default_factory=list)
    streams: list[RequestStream] = field(default_factory=list)
    messages: list[dict[str, object]] = field(default_factory=list)
    options: ChatOptions = ChatOptions()
    aborted: list[str] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        await asyncio.sleep(0)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[dict[str, object]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        await asyncio.sleep(0)
        self.messages, self.options = list(messages), options
        return self.tokenizer.apply_chat_template(messages, options)

    async def check_form(self, form: StructuredOutput) -> None:
        await asyncio.sleep(0)
        _FORMS.check(form)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
    ) -> RequestStream:
        if self.refusals and (refusal := self.refusals.popleft()):
            raise refusal
        if len(prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{len(prompt_token_ids)} tokens, the limit is {self.max_model_len}", param="prompt"
            )
        params = params or SamplingParams()
        request = Request(
            request_id=request_id or f"fake-{len(self.requests)}",
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            arrival_time=0.0,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
        )
        self.requests.append(request)
        detokenizers = [self.tokenizer.detokenizer(params.stop, params.shown_tokens) for _ in range(params.n)]
        stream = RequestStream(request, detokenizers, self._abort, lambda: 0.0)
        self.streams.append(stream)
        script = self.scripts.popleft() if self.scripts else self.default
        self.running[request.request_id] = asyncio.get_running_loop().create_task(self._run(stream, script))
        return stream

    def statistics(self) -> EngineStatistics:
        if self.status.state == "starting":
            raise UnavailableError("the model is being loaded")
        return EngineStatistics(len(self.running), 0, 64, 60, 4 / 64, "window", {}, 256, 100, 64 * 16 * 100)

    def note_rejection(self, reason: str) -> None:
        for observer in self.observers:
            observer.request_rejected(reason)

    def add_observer(self, observer: Observer) -> None:
        self.observers.append(observer)

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running[request_id].cancel()
        self.news.set()

    async def _run(self, stream: RequestStream, script: Script) -> None:
        request = stream.request
        limit = self.max_model_len if request.params.max_tokens is None else request.params.max_tokens
        tokens = script.text[:limit]
        finish = FinishReason.LENGTH if len(script.text) > limit else script.finish
        choices = [self._sequence(request, index, script) for index in range(request.params.n)]
        try:
            for token_id in tokens:
                await asyncio.sleep(0)
                for choice in [c for c in choices if not c.finished]:
                    choice.output_token_ids.append(token_id)
                    if stream.push(choice, Delta(choice.seq_id, token_id, _logprobs(request.params, token_id))):
                        choice.status = sequence.SequenceStatus.FINISHED
                stream.wake()
            self.news.set()
            if script.hold:
                await asyncio.Event().wait()
            if script.error is not None:
                stream.fail(script.error)
            for choice in [c for c in choices if not c.finished]:
                stream.push(choice, Delta(choice.seq_id, finish_reason=finish))
        except asyncio.CancelledError:
            for choice in choices:
                stream.push(choice, Delta(choice.seq_id, finish_reason=FinishReason.ABORT))
        finally:
            stream.wake()
            self.running.pop(request.request_id, None)

    def _sequence(self, request: Request, index: int, script: Script) -> sequence.Sequence:
        choice = sequence.Sequence(index, request, index, seed=0, max_total_tokens=self.max_model_len)
        choice.num_cached_tokens = script.cached_tokens
        if request.params.prompt_logprobs is not None:
            choice.prompt_logprobs += prompt_scores(request.prompt_token_ids[1:], 0)
        return choice


def _logprobs(params: SamplingParams, token_id: int) -> TokenLogprobs | None:
    """-0.5 for the token itself, then falling values for the ids from 65 (``A``) on."""
    if params.logprobs is None:
        return None
    return TokenLogprobs(-0.5, tuple((65 + i, -1.0 - i) for i in range(params.logprobs)))
