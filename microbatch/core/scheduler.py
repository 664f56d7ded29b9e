"""How many tokens of whom, in whose memory: turns a policy's decisions into plans and results into deltas.

Pure: it reads no clock, draws no random number and touches no tensor, so the same object serves the server, the tests
and the simulator. The three calls of a step are ``schedule``, ``apply`` (or ``fail``) and, when sequences must go,
``abort`` and ``finish``. Invariant: every sequence that was added ends with exactly one finish reason, and
then holds no block.
"""

from __future__ import annotations

from collections.abc import Collection

from microbatch.core.budget import StepLimits, share_tokens
from microbatch.core.counters import SchedulerCounters
from microbatch.core.deadline import deadline_error, earliest
from microbatch.core.plan import Delta, StepPlan, StepResult
from microbatch.core.planning import admission, choice_seed, sequence_step
from microbatch.core.policy import Policy, SchedulerView
from microbatch.core.ports import KVManager
from microbatch.core.queue import WaitingQueue
from microbatch.core.request import FinishReason, Request
from microbatch.core.requests import RequestTable
from microbatch.core.residents import Residents
from microbatch.core.sequence import Sequence, SequenceStatus
from microbatch.core.stopping import finish_reason, is_end_token
from microbatch.errors import ExecutionError, MicrobatchError, OutOfMemoryError


class Scheduler:
    """Owns every sequence from ``add`` to its end. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        *,
        eos_token_ids: Collection[int] = (),
        max_num_batched_tokens: int = 2048,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.counters = SchedulerCounters()
        self.draining = False
        self.wake_at: float | None = None
        self.waiting = WaitingQueue()
        self._residents = Residents(kv, self.counters)
        self._requests = RequestTable()
        self._deltas: list[Delta] = []
        self._plan: StepPlan | None = None
        self._num_rows = 0
        self._limits = StepLimits(max_num_batched_tokens)
        self._next_seq_id = 0
        self._next_step_id = 0

    def add(self, request: Request, *, seed: int, max_total_tokens: int, pin_prompt: bool = False) -> list[Sequence]:
        """Take a request in: one sequence for each of its ``n`` choices, the choice's index mixed into its seed.

        ``max_total_tokens`` bounds prompt and output together; the caller has checked that the store can hold that
        many. ``pin_prompt`` keeps the full blocks of the prompt for good once they are computed: a declared shared
        prefix.
        """
        sequences = []
        for index in range(request.params.n):
            sequence = Sequence(self._next_seq_id, request, index, choice_seed(seed, index), max_total_tokens)
            self._next_seq_id += 1
            self.waiting.add(sequence)
            sequences.append(sequence)
        if pin_prompt:
            self._residents.pin_prompt(request.request_id)
        self._requests.add(sequences)
        return sequences

    def abort(self, request_id: str, now: float, error: Exception | None = None) -> list[Delta]:
        """End every choice of a request that is still open. A request that has ended or never was is left alone."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        return [self._end(s, reason, now, error) for s in self._requests.open_sequences(request_id)]

    def abort_all(self, now: float, error: Exception | None = None) -> list[Delta]:
        """End everything."""
        return [delta for request_id in self._requests for delta in self.abort(request_id, now, error)]

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End one sequence for a reason found outside (a stop text); it may have ended already."""
        if not sequence.finished:
            self._end(sequence, reason, now, None)

    # ---- the step

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do before ``wake_at`` (None: before the next arrival).

        Requests whose time is over end here; ``take_deltas`` tells of them.
        """
        self.wake_at = None
        self._expire(now)
        admitted: list[Sequence] = []
        reason = ""
        counts = self._share()
        evicted = self._residents.grow(counts)
        for sequence in evicted:
            self.waiting.add(sequence)
        if not self.running or not (self.policy.run_to_completion or evicted):
            admitted, reason = self._admit(counts, now)
        plan = self._make_plan(counts, admitted, reason)
        self.wake_at = earliest(self.wake_at, self._requests.next_deadline())
        return plan

    def take_deltas(self) -> list[Delta]:
        """News that arose in ``schedule``: requests that expired, sequences that can never run."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def apply(self, result: StepResult, now: float) -> list[Delta]:
        """Advance the sequences of the last plan by its result."""
        plan = self._take_plan(result.step_id)
        if plan.sequences:
            self._limits.note_success()
        live = {s.seq_id: s for s in self.running}
        deltas = []
        for step in plan.sequences:
            sequence = live.get(step.seq_id)
            if sequence is None:
                continue
            if (problem := result.problem(step)) is not None:
                deltas.append(self._end(sequence, FinishReason.ERROR, now, ExecutionError(problem)))
                continue
            self._residents.note_computed(sequence, step.start + len(step.token_ids))
            if step.samples:
                deltas.append(self._advance(sequence, result, now))
        return deltas

    def fail(self, error: Exception, now: float) -> list[Delta]:
        """The last plan failed as a whole.

        Out of memory with company, or with more than one token: the sequences go back to the queue and come again in
        steps half as large, so that what fits alone is served. Any other fault, or a sequence that does not fit alone,
        ends the sequences of the plan.
        """
        plan, self._plan = self._plan, None
        steps = {s.seq_id for s in plan.sequences} if plan is not None else set()
        victims = [s for s in self.running if s.seq_id in steps]
        # a padded batch computes the rows that have ended too, so the last one may fit where all of them did not
        rows = plan.num_rows if plan is not None and plan.run_to_completion else len(victims)
        divisible = rows > 1 or (plan is not None and plan.num_tokens > 1 and not plan.run_to_completion)
        if isinstance(error, OutOfMemoryError) and victims and divisible:
            self._limits.shrink(rows, plan.num_tokens if plan is not None else 1)
            for sequence in victims:
                self._residents.preempt(sequence)
                self.waiting.add(sequence)
            return []
        if not isinstance(error, MicrobatchError):
            error = ExecutionError(f"the model failed on the batch of this request: {type(error).__name__}: {error}")
        return [self._end(s, FinishReason.ERROR, now, error) for s in victims]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks, in the order they came in."""
        return self._residents.sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs and the executor has been told of every end."""
        return not self.running and not self.waiting and not self._residents.has_released

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when sequences, requests and blocks do not add up."""
        self.waiting.check_integrity()
        self.kv.check_integrity()
        live = {s.seq_id for s in self.waiting} | {s.seq_id for s in self.running}
        known = {s.seq_id for request_id in self._requests for s in self._requests.open_sequences(request_id)}
        assert live == known, f"sequences lost or left over: {live ^ known}"
        self._residents.check_integrity()

    def __repr__(self) -> str:
        free, total = self.kv.num_free_blocks, self.kv.num_blocks
        return f"<Scheduler waiting={self.num_waiting} running={self.num_running} blocks={total - free}/{total}>"

    # ---- inside

    def _expire(self, now: float) -> None:
        for sequences in self._requests.expired(now):
            request_id = sequences[0].request.request_id
            self._deltas += self.abort(request_id, now, deadline_error(sequences, now))

    def _share(self) -> dict[int, int]:
        """Tokens to feed of each running sequence: all that is not computed, or its share of the token budget."""
        remaining = [s.num_tokens - s.num_computed_tokens for s in self.running]
        if not self.policy.run_to_completion:
            remaining = share_tokens(remaining, self._limits.num_tokens)
        return {s.seq_id: count for s, count in zip(self.running, remaining, strict=True)}

    def _admit(self, counts: dict[int, int], now: float) -> tuple[list[Sequence], str]:
        """Let the policy's choice in as far as blocks, and between steps also tokens, reach; fills in ``counts``."""
        view = SchedulerView(self.waiting.view(), self.num_running, self.draining)
        decision = self.policy.decide(view, now)
        self.wake_at = decision.wake_at
        wanted = decision.admit[: self._limits.room(self.num_running)]
        budget = self._limits.num_tokens - sum(counts[s.seq_id] for s in self.running)
        admitted: list[Sequence] = []
        for seq_id in wanted:
            sequence = self.waiting.get(seq_id)
            if budget <= 0 and not self.policy.run_to_completion:
                break
            if self._waits_for_leader(sequence):
                continue
            if not self._residents.begin(sequence, now):
                if not self.running:
                    self._refuse(sequence, now)
                return admitted, "memory"
            self.waiting.remove(sequence)
            counts[seq_id] = sequence.num_tokens - sequence.num_computed_tokens
            if not self.policy.run_to_completion:
                counts[seq_id] = min(counts[seq_id], budget)
            budget -= counts[seq_id]
            admitted.append(sequence)
        return admitted, decision.reason if len(wanted) == len(decision.admit) else "memory"

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Between steps the choices of a request share the K/V of their prompt: the first one computes it, the others
        come in when it is there."""
        if self.policy.run_to_completion or not sequence.index or sequence.num_prompt_tokens <= self.kv.block_size:
            return False
        leader = self._requests.leader(sequence)
        return not leader.finished and leader.num_computed_tokens < leader.num_prompt_tokens

    def _refuse(self, sequence: Sequence, now: float) -> None:
        """Nothing runs and still it does not fit: it never will, so it must not wait for ever."""
        needed, total = self.kv.blocks_needed(sequence.num_tokens), self.kv.num_blocks
        error = ExecutionError(f"the sequence needs {needed} K/V blocks, the store has {total} and cannot free enough")
        self._deltas.append(self._end(sequence, FinishReason.ERROR, now, error))

    def _make_plan(self, counts: dict[int, int], admitted: list[Sequence], reason: str) -> StepPlan | None:
        if not self.running and not self._residents.has_released:
            return None
        if admitted or not self.running:
            self._num_rows = len(self.running)
        plan = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple(
                sequence_step(s, self.kv.block_ids(s.seq_id), counts[s.seq_id])
                for s in self.running
                if counts[s.seq_id]
            ),
            admitted=tuple(admission(s) for s in admitted),
            released=self._residents.take_released(),
            run_to_completion=self.policy.run_to_completion,
            num_rows=self._num_rows,
            reason=reason if admitted else "",
        )
        self._next_step_id += 1
        self._plan = plan
        return plan

    def _take_plan(self, step_id: int) -> StepPlan:
        plan, self._plan = self._plan, None
        if plan is None or plan.step_id != step_id:
            raise ValueError(
                f"result of step {step_id} does not belong to the plan that runs ({plan and plan.step_id})"
            )
        return plan

    def _advance(self, sequence: Sequence, result: StepResult, now: float) -> Delta:
        token_id = result.token_ids[sequence.seq_id]
        sequence.output_token_ids.append(token_id)
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        reason = finish_reason(sequence, self.eos_token_ids)
        if reason is not None:
            self._end(sequence, reason, now, None)
        hidden = is_end_token(sequence, token_id, self.eos_token_ids)
        logprobs = None if hidden else result.logprobs.get(sequence.seq_id)
        return Delta(sequence.seq_id, None if hidden else token_id, logprobs, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: Exception | None) -> Delta:
        if sequence.status is SequenceStatus.RUNNING:
            self._residents.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.finish_time = now
        if self._requests.note_end(sequence):
            self._residents.forget(sequence.request.request_id)
        return Delta(sequence.seq_id, finish_reason=reason, error=error)
