"""The one task that drives the engine: commands in, plans to the device, results back.

Everything that changes the engine's state goes through one asyncio queue and is done here, between two steps, by one
task on one thread: no locks. The device works in a thread of its own meanwhile, so the event loop stays free, and what
a step has brought is told to the clients while the device is at the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from microbatch.core.plan import StepPlan
from microbatch.core.ports import Executor
from microbatch.core.request import Request
from microbatch.engine.engine import EngineCore
from microbatch.engine.stats import EngineStatus
from microbatch.engine.stream import RequestStream
from microbatch.engine.worker import WorkerThread
from microbatch.errors import DrainingError, EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 120
#: The interpreter lets one thread run at a time. What is told to the clients right after a step was handed over would
#: hold up its beginning; so much later the step is in the model's arithmetic, which needs no interpreter.
_HEAD_START_S = 0.001
#: To tell a client costs the same however many tokens are told. So where many sequences make quick steps, the tokens of
#: several steps are told at once: not before this time for each running sequence has passed since the last telling.
_TELL_EVERY_S = 40e-6


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    stream: RequestStream
    seed: int
    max_total_tokens: int
    pin_prompt: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EngineLoop:
    """Runs an ``EngineCore`` over an ``Executor``.

    ``max_queue`` bounds the sequences that wait, in the inbox and in the scheduler together; those for which there is a
    free seat in what runs do not count. ``run`` must be the only task that runs it; the other methods are called from
    tasks on the same thread.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        *,
        max_queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.clock = clock
        self.status = EngineStatus("starting", "the engine has not been started")
        self._executor = executor
        self._max_queue = max_queue
        self._inbox: asyncio.Queue[_Submit | _Abort | None] = asyncio.Queue()
        self._num_inbox = 0
        self._worker = WorkerThread("microbatch-executor")
        self._idle = anyio.Event()
        self._stopped = False
        self._told_at = 0.0

    # ---- called by others

    def open(self) -> None:
        """Accept requests from now on; ``run`` must follow."""
        self.status = EngineStatus("ready")

    @property
    def max_queue(self) -> int:
        """Most sequences that may wait."""
        return self._max_queue

    @property
    def num_inbox(self) -> int:
        """Sequences submitted and not yet seen by the scheduler."""
        return self._num_inbox

    def submit(
        self, request: Request, stream: RequestStream, *, seed: int, max_total_tokens: int, pin_prompt: bool = False
    ) -> None:
        """Put a request in the inbox or refuse it at once: a full queue, a draining or dead engine."""
        self._check_open()
        waiting = self._num_inbox + self.core.scheduler.num_waiting
        if request.params.n > self._max_queue:
            raise InvalidRequestError(f"n is at most {self._max_queue}, the length of the queue", param="n")
        if waiting + request.params.n > self._max_queue + self.core.scheduler.num_free_seats:
            self.core.observers.request_rejected("queue_full")
            raise QueueFullError(
                f"the queue is full: {waiting} of {self._max_queue} places are taken", retry_after=self._retry_after()
            )
        if request.request_id in self.core.request_ids:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        self.core.request_ids.add(request.request_id)
        self._num_inbox += request.params.n
        self._inbox.put_nowait(_Submit(request, stream, seed, max_total_tokens, pin_prompt))

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Never fails: unknown and ended requests are left alone."""
        self._inbox.put_nowait(_Abort(request_id))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the others finish for ``timeout_s`` seconds, then end what is left with an error."""
        if self.status.state in ("ready", "starting"):
            self.status = EngineStatus("draining", "the server is shutting down")
        self.core.scheduler.draining = True
        self._inbox.put_nowait(None)
        with anyio.move_on_after(timeout_s):
            while not self._is_idle() and self.status.state == "draining":
                self._idle = anyio.Event()
                await self._idle.wait()
        self._abort_all(DrainingError("the server shut down before the request was done"))

    async def stop(self) -> None:
        """End ``run`` after the step that is under way. What still runs is ended with an error first."""
        self._stopped = True
        self._inbox.put_nowait(None)

    # ---- the task

    async def run(self) -> None:
        """Serve until ``stop``. A fault of the engine itself ends every request with an error and is kept in
        ``status``."""
        try:
            while not self._stopped:
                self._take_commands()
                plan = self.core.begin_step(self.clock())
                if plan is not None:
                    await self._step(plan)
                elif not self.core.deliver():
                    await self._wait()
        except BaseException as error:
            self._die(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._close()
        finally:
            self._idle.set()
            closing = self._worker.call(self._executor.close)
            self._worker.end()
            with anyio.CancelScope(shield=True):
                await closing

    def _die(self, error: BaseException) -> None:
        """However the task ends, nobody may be left waiting for it."""
        logger.error("the engine has died", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self.status = EngineStatus("dead", reason)
        self.core.fail_all(EngineDeadError(f"the engine has died: {reason}"))
        self._refuse_inbox(EngineDeadError(f"the engine has died: {reason}"))

    async def _step(self, plan: StepPlan) -> None:
        step = self._worker.call(self._executor.execute, plan)
        if self.core.has_news:
            due = self._told_at + _TELL_EVERY_S * len(plan.sequences)
            await asyncio.wait((step,), timeout=max(_HEAD_START_S, due - time.monotonic()))
            if not step.done() or time.monotonic() >= due:
                self.core.deliver()
                self._told_at = time.monotonic()
        try:
            result = await step
        except Exception as error:
            logger.exception("step %d failed: %d sequences", plan.step_id, len(plan.sequences))
            # a traceback holds the frames, and these the tensors of the failed step
            self.core.fail_step(error.with_traceback(None), self.clock())
        else:
            self.core.end_step(plan, result, self.clock())

    async def _wait(self) -> None:
        """Until the next command, or until the scheduler wants to be asked again."""
        if self._is_idle():
            self._idle.set()
        wake_at = self.core.scheduler.wake_at
        if not self._inbox.empty():
            return
        timeout = None if wake_at is None else max(0.0, wake_at - self.clock())
        with anyio.move_on_after(timeout):
            self._do(await self._inbox.get())

    def _take_commands(self) -> None:
        while not self._inbox.empty():
            self._do(self._inbox.get_nowait())

    def _do(self, command: _Submit | _Abort | None) -> None:
        if isinstance(command, _Submit):
            self._num_inbox -= command.request.params.n
            self.core.add(
                command.request,
                command.stream,
                seed=command.seed,
                max_total_tokens=command.max_total_tokens,
                pin_prompt=command.pin_prompt,
            )
        elif isinstance(command, _Abort):
            self.core.abort(command.request_id, self.clock())

    def _close(self) -> None:
        self.status = EngineStatus("closed", "the engine was closed")
        self._abort_all(DrainingError("the engine was closed before the request was done"))

    def _abort_all(self, error: Exception) -> None:
        self._take_commands()  # what came before and was not seen yet is told of it too
        self.core.abort_all(self.clock(), error)
        self.core.deliver()

    def _refuse_inbox(self, error: Exception) -> None:
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            if isinstance(command, _Submit):
                command.stream.fail(error)
        self._num_inbox = 0

    def _is_idle(self) -> bool:
        return self._inbox.empty() and self.core.scheduler.idle

    def _check_open(self) -> None:
        state, reason = self.status
        if state == "draining" or self._stopped and state == "ready":
            self.core.observers.request_rejected("draining")
            raise DrainingError("the server is shutting down and takes no new requests")
        if state != "ready":
            self.core.observers.request_rejected("dead")
            raise EngineDeadError(f"the engine is not running: {reason}")

    def _retry_after(self) -> int:
        """Seconds after which to try again: places become free when the next batch is taken, so as long as the last
        ran."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self.core.batch_seconds)))

    def __repr__(self) -> str:
        return f"<EngineLoop {self.status.state} inbox={self._inbox.qsize()} {self.core!r}>"
