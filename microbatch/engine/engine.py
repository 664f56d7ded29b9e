"""The synchronous owner of the engine's state: the scheduler, and the stream of every request in it.

Every method runs on one thread and returns at once; the loop does the waiting and the calls to the device between them.
"""

from __future__ import annotations

import logging

from microbatch.core.plan import Delta, StepPlan, StepResult
from microbatch.core.request import FinishReason, Request
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.engine.stats import EngineStatistics, Observers, RequestRecord
from microbatch.engine.stream import RequestStream
from microbatch.errors import ExecutionError

logger = logging.getLogger(__name__)


class EngineCore:
    """``add`` and ``abort`` requests; ``begin_step`` gives the next plan, ``end_step`` or ``fail_step`` takes its
    outcome."""

    def __init__(
        self, scheduler: Scheduler, observers: Observers | None = None, *, kv_bytes_per_token: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.observers = observers or Observers()
        self._kv_bytes_per_token = kv_bytes_per_token
        self._live: dict[int, tuple[Sequence, RequestStream]] = {}
        self._last_token: dict[int, float] = {}
        self._seen = (0, 0, 0)
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
            self._live[sequence.seq_id] = (sequence, stream)

    def abort(self, request_id: str, now: float, error: Exception | None = None) -> None:
        """End a request; unknown and ended ones are left alone."""
        self._dispatch(self.scheduler.abort(request_id, now, error), now)

    def abort_all(self, now: float, error: Exception | None = None) -> None:
        """End every request."""
        self._dispatch(self.scheduler.abort_all(now, error), now)

    def begin_step(self, now: float) -> StepPlan | None:
        """The next plan, or None: nothing to do before ``scheduler.wake_at`` or the next command."""
        while True:
            plan = self.scheduler.schedule(now)
            deltas = self.scheduler.take_deltas()
            self._dispatch(deltas, now)
            if plan is not None or not deltas:
                break
        self._report_counters()
        if plan is not None and plan.admitted and plan.run_to_completion:
            self.observers.batch_closed(plan.reason, len(plan.sequences))
            self._batch_began = now
        return plan

    def end_step(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Advance by a result and tell the streams."""
        deltas = self.scheduler.apply(result, now)
        if plan.sequences:
            self.observers.step_done(self._prompt_tokens(plan), len(result.token_ids), plan.useful_token_ratio)
        self._dispatch(deltas, now)
        self._note_end_of_batch(now)

    def fail_step(self, error: Exception, now: float) -> None:
        """The step failed as a whole."""
        self._dispatch(self.scheduler.fail(error, now), now)
        self._report_counters()
        self._note_end_of_batch(now)

    def fail_all(self, error: Exception) -> None:
        """The engine is dead: end every stream without asking the scheduler."""
        for _, stream in self._live.values():
            stream.fail(error)
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
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_cache_bytes=self._kv_bytes_per_token * scheduler.kv.block_size * total,
        )

    def _prompt_tokens(self, plan: StepPlan) -> int:
        """Prompt tokens that a plan feeds, in whole prompts or in chunks."""
        count = 0
        for step in plan.sequences:
            if step.seq_id in self._live:
                prompt = self._live[step.seq_id][0].num_prompt_tokens
                count += max(0, min(prompt - step.start, len(step.token_ids)))
        return count

    def _note_end_of_batch(self, now: float) -> None:
        if self._batch_began is not None and not self.scheduler.num_running:
            self.batch_seconds, self._batch_began = now - self._batch_began, None

    def _dispatch(self, deltas: list[Delta], now: float) -> None:
        for delta in deltas:
            if delta.seq_id not in self._live:
                continue
            sequence, stream = self._live[delta.seq_id]
            if delta.token_id is not None:
                self._time_token(sequence, now)
            try:
                stopped = stream.push(sequence, delta)
            except Exception as error:  # a fault in turning tokens into text must end this request alone
                logger.exception("request %s: its text could not be made", sequence.request.request_id)
                self._give_up(sequence, stream, error, now)
                continue
            if stopped:
                self.scheduler.finish(sequence, FinishReason.STOP, now)
            if sequence.finished:
                self._forget(sequence.seq_id)
                if stream.finished:
                    self._record(sequence, stream)

    def _give_up(self, sequence: Sequence, stream: RequestStream, error: Exception, now: float) -> None:
        stream.fail(ExecutionError(f"the answer could not be turned into text: {error}"))
        self.scheduler.abort(sequence.request.request_id, now)
        for seq_id in [i for i, (_, s) in self._live.items() if s is stream]:
            self._forget(seq_id)
        self._record(sequence, stream)

    def _forget(self, seq_id: int) -> None:
        del self._live[seq_id]
        self._last_token.pop(seq_id, None)

    def _record(self, sequence: Sequence, stream: RequestStream) -> None:
        self.request_ids.discard(stream.request_id)
        reason = FinishReason.ERROR if stream.error is not None else sequence.finish_reason or FinishReason.ERROR
        record = RequestRecord.make(reason, stream.usage(), stream.timings(), stream.request.params.n)
        self.observers.request_finished(record)

    def _time_token(self, sequence: Sequence, now: float) -> None:
        last = self._last_token.get(sequence.seq_id)
        if last is not None:
            self.observers.token_gap(now - last)
        self._last_token[sequence.seq_id] = now

    def _report_counters(self) -> None:
        counters = self.scheduler.counters
        seen = (counters.num_preemptions, counters.prefix_query_tokens, counters.prefix_hit_tokens)
        preemptions, queries, hits = (a - b for a, b in zip(seen, self._seen, strict=True))
        self._seen = seen
        if preemptions:
            self.observers.preempted(preemptions)
        if queries:
            self.observers.prefix_lookup(queries, hits)

    def __repr__(self) -> str:
        return f"<EngineCore {len(self._live)} sequences {self.scheduler!r}>"
