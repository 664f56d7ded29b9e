"""The synchronous face of the library: a list of prompts in, a list of answers out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import anyio
from rich.progress import Progress

from microbatch.core.request import SamplingParams
from microbatch.engine.outputs import RequestOutput
from microbatch.errors import EngineDeadError, QueueFullError
from microbatch.wiring import Engine

T = TypeVar("T")
#: Between two tries while the queue is full, in seconds.
_PAUSE_S = 0.05


class LLM:
    """``LLM("model").generate(["a", "b"], params)``. Takes the settings of ``Engine``; usable as a context manager.

    The engine runs in a thread of its own with its own event loop, so this works in scripts, notebooks and tests alike.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._engine = Engine(model, **settings)
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        # A daemon, so that a script that never calls close can end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="microbatch-llm", daemon=True)
        self._thread.start()
        try:
            self._call(self._engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine behind; its methods belong to the engine's thread."""
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts (texts, or lists of token ids). One set of parameters for all, or one
        each.

        The first error of any prompt is raised after the others have been ended.
        """
        items: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        return self._call(self._run([(p, None) for p in items], _per_item(params, len(items)), progress))

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, object]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to conversations, each a list of messages with ``role`` and ``content``."""
        items = [(None, messages) for messages in conversations]
        return self._call(self._run(items, _per_item(params, len(items)), progress))

    def close(self) -> None:
        """End the engine and its thread. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._engine.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise EngineDeadError("the LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt of the caller ends the work as well
            future.cancel()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _run(
        self, items: Sequence[tuple[Any, Any]], params: Sequence[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(items)
        errors: list[Exception] = []
        largest = max((p.n for p in params), default=1)
        limiter = anyio.CapacityLimiter(max(1, self._engine.parts.loop.max_queue // largest))
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("requests", total=len(items))

            async def one(index: int) -> None:
                prompt, messages = items[index]
                async with limiter:
                    try:
                        outputs[index] = await self._patiently(prompt, params[index], messages)
                    except Exception as error:
                        errors.append(error)
                        group.cancel_scope.cancel()
                bar.advance(task)

            async with anyio.create_task_group() as group:
                for index in range(len(items)):
                    group.start_soon(one, index)
        if errors:
            raise errors[0]
        return [output for output in outputs if output is not None]

    async def _patiently(self, prompt: Any, params: SamplingParams, messages: Any) -> RequestOutput:
        """Ask again while the queue is full: places that an aborted request held come back with the next step."""
        while True:
            try:
                return await self._engine.generate(prompt, params, messages=messages)
            except QueueFullError:
                await anyio.sleep(_PAUSE_S)


def _per_item(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need {count} sets of parameters or one, got {len(params)}")
    return list(params)
