"""The reading end of a request: text deltas of its choices, in order, and what is known at the end."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence as SequenceABC
from types import TracebackType

from microbatch.core.plan import Delta, TokenLogprobs
from microbatch.core.ports import Detokenizer
from microbatch.core.request import FinishReason, Request
from microbatch.core.sequence import Sequence
from microbatch.engine.bell import Bell
from microbatch.engine.outputs import Choice, ChoiceDelta, RequestOutput, Timings, Usage
from microbatch.engine.unread import Unread


class RequestStream:
    """Iterate for ``ChoiceDelta`` values; the iteration ends when every choice has ended.

    An error of the request is raised from the iteration, after the deltas before it. Leaving ``async with stream``
    early, or cancelling the task that iterates inside it, aborts the request. A slow reader costs no one else anything:
    unread deltas of a choice are joined into one, so at most one per choice waits.
    """

    def __init__(
        self,
        request: Request,
        detokenizers: SequenceABC[Detokenizer],
        abort: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self._detokenizers = detokenizers
        self._abort = abort
        self._clock = clock
        self._unread = [Unread(index) for index in range(request.params.n)]
        self._ready: deque[Unread] = deque()
        self._wait_for_end = False
        self._open = set(range(request.params.n))
        self._error: Exception | None = None
        self._bell = Bell()
        self._max_unread = sys.maxsize
        self._overrun: Callable[[], None] = self.abort
        self._sequences: dict[int, Sequence] = {}
        self._finished_at: float | None = None

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def finished(self) -> bool:
        """Whether every choice has ended (deltas may still be unread)."""
        return not self._open

    @property
    def error(self) -> Exception | None:
        """The error that ended the request, if one did."""
        return self._error

    def abort(self) -> None:
        """End the request now. Harmless when it has ended already."""
        if self._open:
            self._abort(self.request_id)

    def push(self, sequence: Sequence, delta: Delta) -> bool:
        """Take news of one choice; returns True when a stop text was found and the sequence must end.

        ``wake`` the reader when all news of the moment are in.
        """
        index = sequence.index
        if index not in self._open:
            return False
        self._sequences[index] = sequence
        detokenizer, unread = self._detokenizers[index], self._unread[index]
        if delta.token_id is not None:
            unread.add(detokenizer.push(delta.token_id), delta.token_id, delta.logprobs)
            if len(unread.token_ids) > self._max_unread:
                self._overrun()
        if not unread.in_line:
            unread.in_line = True
            self._ready.append(unread)
        if delta.finish_reason is not None or detokenizer.stopped:
            return self._finish(index, delta)
        return False

    def wake(self) -> None:
        """Let the reader run, unless it wants the whole answer and there is more to come."""
        if not (self._wait_for_end and self._open):
            self._bell.ring()

    def listen(self, bell: Bell, max_unread: int, overrun: Callable[[], None]) -> None:
        """For a reader of several streams: wake it by ``bell``, who then calls ``take``. ``overrun`` is called when it
        has left more than ``max_unread`` tokens of a choice unread."""
        self._bell, self._max_unread, self._overrun = bell, max_unread, overrun

    def take(self) -> list[ChoiceDelta]:
        """Everything that is unread now, one delta for each choice that has news."""
        deltas = [unread.take() for unread in self._ready]
        self._ready.clear()
        return deltas

    def fail(self, error: Exception) -> None:
        """End every open choice with ``error``; used when no sequence can tell it (a dead engine)."""
        for index in sorted(self._open):
            self._close(index, error)
        self.wake()

    def usage(self) -> Usage:
        """Tokens so far."""
        sequences = self._sequences.values()
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(len(s.output_token_ids) for s in sequences),
            cached_tokens=max((s.num_cached_tokens for s in sequences if s.index == 0), default=0),
        )

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of the prompt's tokens from the second on, if they are asked for: whole from the first delta on."""
        if self.request.params.prompt_logprobs is None or 0 not in self._sequences:
            return None
        return tuple(self._sequences[0].prompt_logprobs)

    def timings(self) -> Timings:
        """Times so far, of the choice that was first at each."""
        arrival = self.request.arrival_time
        scheduled = [s.first_scheduled_time for s in self._sequences.values() if s.first_scheduled_time is not None]
        first = [s.first_token_time for s in self._sequences.values() if s.first_token_time is not None]
        return Timings(
            queue=min(scheduled) - arrival if scheduled else None,
            ttft=min(first) - arrival if first else None,
            e2e=None if self._finished_at is None else self._finished_at - arrival,
        )

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        while True:
            while self._ready:
                yield self._ready.popleft().take()
            if not self._open:
                break
            await self._bell.wait()
        if self._error is not None:
            raise self._error

    async def collect(self) -> RequestOutput:
        """Read to the end and return the whole answer; raises the error of the request, if any."""
        self._wait_for_end = True
        while self._open:
            await self._bell.wait()
        if self._error is not None:
            raise self._error
        self._ready.clear()
        choices = tuple(_choice(unread.take()) for unread in self._unread)
        return RequestOutput(self.request_id, choices, self.usage(), self.timings(), self.prompt_logprobs)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _finish(self, index: int, delta: Delta) -> bool:
        detokenizer, reason = self._detokenizers[index], delta.finish_reason
        if not detokenizer.stopped:
            self._unread[index].text.append(detokenizer.finish())
        self._unread[index].finish_reason = FinishReason.STOP if detokenizer.stopped else reason
        self._close(index, delta.error)
        return detokenizer.stopped and reason is None

    def _close(self, index: int, error: Exception | None) -> None:
        self._open.discard(index)
        if error is not None and self._error is None:
            self._error = error
        if not self._open:
            self._finished_at = self._clock()

    def __repr__(self) -> str:
        return f"<RequestStream {self.request_id} open={sorted(self._open)} unread={len(self._ready)}>"


def _choice(whole: ChoiceDelta) -> Choice:
    reason = whole.finish_reason or FinishReason.ERROR
    return Choice(whole.index, whole.text, whole.token_ids, reason, whole.logprobs)
