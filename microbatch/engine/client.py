"""The engine as its callers use it: prompts in, text out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence as SequenceABC
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from microbatch.core.chat import ChatOptions
from microbatch.core.ports import Forms, Tokenizer
from microbatch.core.request import Request, SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.engine.admission import check_prompt
from microbatch.engine.outputs import ChoiceDelta, RequestOutput
from microbatch.engine.parts import EngineParts
from microbatch.engine.prefix import SharedPrefix
from microbatch.engine.stats import EngineStatistics, EngineStatus, Observer
from microbatch.engine.stream import RequestStream
from microbatch.errors import InvalidRequestError, SetupError, UnavailableError, UnsupportedError

Message = dict[str, object]
#: Threads that turn text into tokens: one very long prompt must not hold up the others.
_ENCODERS = 4
EngineT = TypeVar("EngineT", bound="AsyncEngine")


class AsyncEngine:
    """Serves one model in this process: ``async with engine: await engine.generate("The capital of France is")``.

    ``build`` makes the parts; it may take its time, and is called in a worker thread by ``start``. Nothing is global:
    any number of engines may live in one process. Cancelling a task that waits for an answer aborts its request.
    """

    def __init__(self, build: Callable[[], EngineParts], *, model_name: str = "") -> None:
        self._build = build
        self._name = model_name
        self._parts: EngineParts | None = None
        self._task: asyncio.Task[None] | None = None
        self._encoding = CapacityLimiter(_ENCODERS)
        self._declaring = False
        self._observers: list[Observer] = []
        self._failure: str | None = None

    # ---- life

    async def start(self) -> None:
        """Load everything and begin to serve; returns when requests are accepted. Raises ``SetupError``."""
        if self._parts is not None:
            raise SetupError("the engine was started before; make a new one")
        try:
            parts = await to_thread.run_sync(self._build)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        for observer in self._observers:
            parts.loop.core.observers.add(observer)
        parts.loop.open()
        self._task = asyncio.create_task(parts.loop.run(), name="microbatch-engine")
        self._parts = parts
        if parts.system_prompt is not None and parts.shares_prefixes:
            await self._declare(parts.system_prompt)

    async def _declare(self, system_prompt: str) -> None:
        self._declaring = True
        try:
            await SharedPrefix(self).declare(system_prompt)
            # What is pinned can hold nothing else any more.
            held = self.parts.loop.core.scheduler.kv.max_num_tokens()
            self._parts = replace(self.parts, max_model_len=min(self.parts.max_model_len, held))
            self._declaring = False
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            await self.close()
            raise

    async def drain(self, timeout_s: float = 30.0) -> None:
        """Refuse new requests and let the others finish, for at most ``timeout_s`` seconds."""
        if self._parts is not None:
            await self._parts.loop.drain(timeout_s)

    async def close(self) -> None:
        """End what runs with an error and free the device. Idempotent."""
        if self._parts is not None and self._task is not None:
            await self._parts.loop.stop()
            await asyncio.shield(self._task)

    async def __aenter__(self: EngineT) -> EngineT:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ---- facts

    @property
    def status(self) -> EngineStatus:
        """starting, ready, draining, dead or closed, and why."""
        if self._failure is not None:
            return EngineStatus("dead", self._failure)
        if self._parts is None:
            return EngineStatus("starting", "the model is being loaded")
        if self._declaring and self._parts.loop.status.state == "ready":
            return EngineStatus("starting", "the system prompt is being computed")
        return self._parts.loop.status

    @property
    def parts(self) -> EngineParts:
        """The parts of a started engine; ``UnavailableError`` before that."""
        if self._parts is None:
            raise UnavailableError(f"the engine is not running: {self.status.reason}", retry_after=5)
        return self._parts

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._name if self._parts is None else self._parts.model_name

    @property
    def fingerprint(self) -> str:
        """Changes when the answers of the model may change: another model, version or precision."""
        return self.parts.fingerprint

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.parts.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.parts.tokenizer

    @property
    def system_prompt(self) -> str | None:
        """The declared system prompt, used in every conversation that brings none."""
        return self.parts.system_prompt

    def statistics(self) -> EngineStatistics:
        """Numbers of this moment."""
        loop = self.parts.loop
        return loop.core.statistics(loop.num_inbox, loop.max_queue)

    def note_rejection(self, reason: str) -> None:
        """Tell the observers of a request that was refused before ``submit``."""
        self.parts.loop.core.observers.request_rejected(reason)

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of everything that happens from now on."""
        self._observers.append(observer)
        if self._parts is not None:
            self._parts.loop.core.observers.add(observer)

    # ---- prompts

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text prompt. Runs in a worker thread, one at a time."""
        encode = partial(self.parts.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await to_thread.run_sync(encode, limiter=self._encoding)

    async def encode_chat(self, messages: SequenceABC[Message], options: ChatOptions = ChatOptions()) -> list[int]:
        """Token ids of a conversation, the declared system prompt in front when it brings no system message."""
        parts = self.parts
        if parts.system_prompt is not None and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": parts.system_prompt}, *messages]
        return await to_thread.run_sync(parts.tokenizer.apply_chat_template, messages, options, limiter=self._encoding)

    async def check_form(self, form: StructuredOutput) -> None:
        """Get the form of an answer ready. Runs in a worker thread. Raises ``InvalidRequestError``."""
        await to_thread.run_sync(self._forms().check, form, limiter=self._encoding)

    def _forms(self) -> Forms:
        forms = self.parts.forms
        if forms is None:
            raise UnsupportedError("structured output is not supported by this engine")
        return forms

    # ---- requests

    def submit(
        self,
        prompt_token_ids: SequenceABC[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
        pin_prompt: bool = False,
    ) -> RequestStream:
        """Accept a request or refuse it at once. The answer comes from the stream; use it in ``async with``.

        ``deadline_s``: seconds after which it ends with an error. ``cache_salt``: share no cached K/V with requests of
        another salt. ``pin_prompt``: keep the K/V of the prompt's full blocks for good (a declared shared prefix).
        Raises ``InvalidRequestError``, ``ContextLengthError``, ``QueueFullError``, ``UnavailableError``.
        """
        parts, params = self.parts, params or SamplingParams()
        loop, now = parts.loop, self.parts.loop.clock()
        check_prompt(parts, prompt_token_ids, params)
        if params.structured_output is not None:
            self._forms().check(params.structured_output)  # at hand after ``check_form``, or else compiled now
        seconds = parts.request_timeout_s if deadline_s is None else deadline_s
        patience = parts.queue_timeout_s
        if pin_prompt:  # not a client's request: nobody waits for it but the start
            seconds = patience = None
        request = Request(
            request_id=request_id or secrets.token_hex(12),
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            arrival_time=now,
            deadline=None if seconds is None else now + seconds,
            queue_deadline=None if patience is None else now + patience,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
        )
        make_detokenizer = partial(
            parts.tokenizer.detokenizer, params.stop, params.shown_tokens, whole=params.structured_output is not None
        )
        detokenizers = [make_detokenizer() for _ in range(params.n)]
        stream = RequestStream(request, detokenizers, loop.abort, loop.clock)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        room = parts.max_model_len - len(prompt_token_ids)
        total = len(prompt_token_ids) + (room if params.max_tokens is None else min(room, params.max_tokens))
        loop.submit(request, stream, seed=seed, max_total_tokens=total, pin_prompt=pin_prompt)
        return stream

    async def generate(
        self,
        prompt: str | SequenceABC[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: SequenceABC[Message] | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The whole answer to a text, to token ids or to a conversation; ``options`` as for ``submit``."""
        token_ids = await self._prompt(prompt, messages, params)
        async with self.submit(token_ids, params, **options) as stream:
            return await stream.collect()

    async def stream(
        self,
        prompt: str | SequenceABC[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: SequenceABC[Message] | None = None,
        **options: Any,
    ) -> AsyncIterator[ChoiceDelta]:
        """The answer piece by piece; leaving the iteration aborts the request."""
        token_ids = await self._prompt(prompt, messages, params)
        async with self.submit(token_ids, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def _prompt(
        self,
        prompt: str | SequenceABC[int] | None,
        messages: SequenceABC[Message] | None,
        params: SamplingParams | None,
    ) -> SequenceABC[int]:
        if params is not None and params.structured_output is not None:
            await self.check_form(params.structured_output)
        if (prompt is None) == (messages is None):
            raise InvalidRequestError("give either a prompt or messages", param="prompt")
        if messages is not None:
            return await self.encode_chat(messages)
        assert prompt is not None
        return await self.encode(prompt) if isinstance(prompt, str) else prompt

    def __repr__(self) -> str:
        return f"<AsyncEngine {self.model_name!r} {self.status.state}>"
