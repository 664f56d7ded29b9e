"""The synchronous owner of the engine's state: the scheduler, and the stream of every request in it.

Every method runs on one thread and returns at once; the loop does the waiting and the calls to the device between them.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace

from microbatch.core.counters import SchedulerCounters
from microbatch.core.plan import Delta, StepPlan, StepResult
from microbatch.core.request import FinishReason, Request
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.engine.stats import EngineStatistics, Observers, RequestRecord
from microbatch.engine.stream import RequestStream
from microbatch.errors import ExecutionError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A sequence that has not ended, and whom to tell of it."""

    sequence: Sequence
    stream: RequestStream
    last_token_time: float | None = None


class EngineCore:
    """``add`` and ``abort`` requests; ``begin_step`` gives the next plan, ``end_step`` or ``fail_step`` takes its
    outcome, ``deliver`` tells the streams.

    Telling is apart so that the loop can do it while the device works on the next step. Only a sequence that may end by
    a stop text is told at once: its text decides whether it is in that step.
    """

    def __init__(
        self, scheduler: Scheduler, observers: Observers | None = None, *, kv_bytes_per_token: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.observers = observers or Observers()
        self._kv_bytes_per_token = kv_bytes_per_token
        self._live: dict[int, _Live] = {}
        self._stoppable: set[int] = set()
        self._prefilling: dict[int, int] = {}
        self._news: list[tuple[float, list[Delta]]] = []
        self._told: list[RequestStream] = []
        self._seen = SchedulerCounters()
        #: Requests that were accepted and have not ended.
        self.request_ids: set[str] = set()
        self._batch_began: float | None = None
        #: How long the last batch that ended has run, in seconds.
        self.batch_seconds = 0.0

    def add(
        self, request: Request, stream: RequestStream, *, seed: int, max_total_tokens: int, pin_prompt: bool = False
    ) -> None:
        """Take a request over; from here on its stream is told everything. Arguments as for ``Scheduler.add``."""
        sequences = self.scheduler.add(request, seed=seed, max_total_tokens=max_total_tokens, pin_prompt=pin_prompt)
        for sequence in sequences:
            self._live[sequence.seq_id] = _Live(sequence, stream)
        if request.params.stop:
            self._stoppable.update(s.seq_id for s in sequences)

    def abort(self, request_id: str, now: float, error: Exception | None = None) -> None:
        """End a request; unknown and ended ones are left alone."""
        self._note(self.scheduler.abort(request_id, now, error), now)

    def abort_all(self, now: float, error: Exception | None = None) -> None:
        """End every request."""
        self._note(self.scheduler.abort_all(now, error), now)

    def begin_step(self, now: float) -> StepPlan | None:
        """The next plan, or None: nothing to do before ``scheduler.wake_at`` or the next command."""
        while True:
            plan = self.scheduler.schedule(now)
            deltas = self.scheduler.take_deltas()
            self._note(deltas, now)
            if plan is not None or not deltas:
                break
        self._report_counters()
        if plan is not None and plan.admitted:
            self._prefilling.update((a.seq_id, len(a.prompt_token_ids)) for a in plan.admitted)
            if plan.run_to_completion:
                self.observers.batch_closed(plan.reason, len(plan.sequences))
                self._batch_began = now
        return plan

    def end_step(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Advance by a result."""
        deltas = self.scheduler.apply(result, now)
        if plan.sequences:
            self.observers.step_done(self._prompt_tokens(plan), len(result.token_ids), plan.useful_token_ratio)
        self._note(deltas, now)
        self._note_end_of_batch(now)

    def fail_step(self, error: Exception, now: float) -> None:
        """The step failed as a whole."""
        self._note(self.scheduler.fail(error, now), now)
        self._report_counters()
        self._note_end_of_batch(now)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to ``deliver``."""
        return bool(self._news or self._told)

    def deliver(self) -> bool:
        """Tell the streams what they have not been told yet and wake their readers; False when there is nothing."""
        news, self._news = self._news, []
        for now, deltas in news:
            self._tell(deltas, now)
        told, self._told = self._told, []
        for stream in told:
            stream.wake()
        return bool(news or told)

    def fail_all(self, error: Exception) -> None:
        """The engine is dead: end every stream without asking the scheduler."""
        with contextlib.suppress(Exception):  # whoever has ended already gets the rest of the answer
            self.deliver()
        for live in self._live.values():
            live.stream.fail(error)
        self._live.clear()

    def statistics(self, num_inbox: int = 0, max_queue: int = 256) -> EngineStatistics:
        """A snapshot; ``num_inbox`` sequences wait before the scheduler, in a queue of ``max_queue`` places."""
        scheduler = self.scheduler
        total, free = scheduler.kv.num_blocks, scheduler.kv.num_free_blocks
        return EngineStatistics(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_inbox,
            num_blocks=total,
            num_free_blocks=free,
            kv_cache_usage=(total - free) / total,
            policy=scheduler.policy.name,
            policy_parameters=scheduler.policy.parameters(),
            max_queue=max_queue,
            num_free_seats=scheduler.num_free_seats,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_cache_bytes=self._kv_bytes_per_token * scheduler.kv.block_size * total,
            kv_fragmentation=scheduler.residents.fragmentation,
        )

    def _prompt_tokens(self, plan: StepPlan) -> int:
        """Prompt tokens that a plan has fed, in whole prompts or in chunks."""
        if not self._prefilling:
            return 0
        count = 0
        for step in plan.sequences:
            prompt = self._prefilling.get(step.seq_id)
            if prompt is not None:
                count += max(0, min(prompt - step.start, len(step.token_ids)))
                if step.start + len(step.token_ids) >= prompt:
                    del self._prefilling[step.seq_id]
        return count

    def _note_end_of_batch(self, now: float) -> None:
        if self._batch_began is not None and not self.scheduler.num_running:
            self.batch_seconds, self._batch_began = now - self._batch_began, None

    def _note(self, deltas: list[Delta], now: float) -> None:
        """Keep news for ``deliver``; of sequences that may end by a stop text, only the waking of the reader. Each
        sequence always goes the same way, so its news stay in order."""
        if self._stoppable:
            self._tell([d for d in deltas if d.seq_id in self._stoppable], now)
            deltas = [d for d in deltas if d.seq_id not in self._stoppable]
        if deltas:
            self._news.append((now, deltas))

    def _tell(self, deltas: list[Delta], now: float) -> None:
        gaps: dict[float, int] = {}
        for delta in deltas:
            live = self._live.get(delta.seq_id)
            if live is None:
                continue
            if delta.token_id is not None:
                if (last := live.last_token_time) is not None:
                    gaps[last] = gaps.get(last, 0) + 1
                live.last_token_time = now
            self._told.append(live.stream)
            try:
                stopped = live.stream.push(live.sequence, delta)
            except Exception as error:  # a fault in turning tokens into text must end this request alone
                logger.exception("request %s: its text could not be made", live.stream.request_id)
                self._give_up(live, error, now)
                continue
            if stopped or delta.finish_reason is not None:
                self._end(live, stopped, now)
        for last, count in gaps.items():
            self.observers.token_gaps(now - last, count)

    def _end(self, live: _Live, stopped: bool, now: float) -> None:
        if stopped:
            self.scheduler.finish(live.sequence, FinishReason.STOP, now)
        self._forget(live.sequence.seq_id)
        if live.stream.finished:
            self._record(live.sequence, live.stream)

    def _give_up(self, live: _Live, error: Exception, now: float) -> None:
        live.stream.fail(ExecutionError(f"the answer could not be turned into text: {error}"))
        self.scheduler.abort(live.stream.request_id, now)
        for seq_id in [i for i, other in self._live.items() if other.stream is live.stream]:
            self._forget(seq_id)
        self._record(live.sequence, live.stream)

    def _forget(self, seq_id: int) -> None:
        del self._live[seq_id]
        self._prefilling.pop(seq_id, None)
        self._stoppable.discard(seq_id)

    def _record(self, sequence: Sequence, stream: RequestStream) -> None:
        self.request_ids.discard(stream.request_id)
        reason = FinishReason.ERROR if stream.error is not None else sequence.finish_reason or FinishReason.ERROR
        record = RequestRecord.make(stream.request, reason, stream.usage(), stream.timings())
        self.observers.request_finished(record)

    def _report_counters(self) -> None:
        counters = self.scheduler.counters
        if counters == self._seen:
            return
        new, self._seen = counters.since(self._seen), replace(counters)
        if new.num_preemptions:
            self.observers.preempted(new.num_preemptions)
        if new.prefix_query_tokens:
            self.observers.prefix_lookup(new.prefix_query_tokens, new.prefix_hit_tokens, new.pinned_hit_tokens)
        if new.swapped_out_blocks or new.swapped_in_blocks:
            self.observers.blocks_swapped(new.swapped_out_blocks, new.swapped_in_blocks)
        if new.forked_tokens:
            self.observers.prompt_forked(new.forked_tokens)

    def __repr__(self) -> str:
        return f"<EngineCore {len(self._live)} sequences {self.scheduler!r}>"
