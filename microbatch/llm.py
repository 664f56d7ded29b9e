"""The synchronous face of the library: a list of prompts in, a list of answers out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal
from rich.progress import Progress

from microbatch.core.request import SamplingParams
from microbatch.engine.outputs import RequestOutput
from microbatch.wiring import Engine

#: Requests in flight at once; enough for any batch to fill, far below the bound of the queue.
_IN_FLIGHT = 64


class LLM:
    """``LLM("model").generate(["a", "b"], params)``. Takes the settings of ``Engine``; usable as a context manager.

    The engine runs in a thread of its own with its own event loop, so this works in scripts, notebooks and tests alike.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._engine = Engine(model, **settings)
        try:
            self._portal.call(self._engine.start)
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._portal.call, self._engine.close)

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
        return self._portal.call(self._run, [(p, None) for p in items], _per_item(params, len(items)), progress)

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, object]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to conversations, each a list of messages with ``role`` and ``content``."""
        items = [(None, messages) for messages in conversations]
        return self._portal.call(self._run, items, _per_item(params, len(items)), progress)

    def close(self) -> None:
        """End the engine and its thread. Idempotent."""
        self._stack.close()

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
        limiter = anyio.CapacityLimiter(_IN_FLIGHT)
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("requests", total=len(items))

            async def one(index: int) -> None:
                prompt, messages = items[index]
                async with limiter:
                    try:
                        outputs[index] = await self._engine.generate(prompt, params[index], messages=messages)
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


def _per_item(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need {count} sets of parameters or one, got {len(params)}")
    return list(params)
