"""How many tokens of whom, in whose memory: turns a policy's decisions into plans and results into deltas.

Pure: it reads no clock, draws no random number and touches no tensor, so the same object serves the server, the tests
and the simulator. The three calls of a step are ``schedule``, ``apply`` (or ``fail``) and, when sequences must go,
``abort`` and ``finish``. Invariant: every sequence that was added ends with exactly one finish reason, and
then holds no block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from microbatch.core.admission import Admission
from microbatch.core.budget import StepLimits
from microbatch.core.counters import SchedulerCounters
from microbatch.core.deadline import deadline_error, earliest
from microbatch.core.plan import Delta, StepPlan, StepResult, TokenLogprobs
from microbatch.core.planning import admission, choice_seed, sequence_step
from microbatch.core.policy import Policy, SchedulerView
from microbatch.core.ports import KVManager
from microbatch.core.queue import WaitingQueue
from microbatch.core.request import FinishReason, Request
from microbatch.core.requests import RequestTable
from microbatch.core.residents import Residents
from microbatch.core.sequence import Sequence, SequenceStatus
from microbatch.core.stopping import end_tokens
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
        self.residents = Residents(kv, self.counters)
        self._requests = RequestTable()
        self._admission = Admission(self.waiting, self.residents, self._requests)
        self._deltas: list[Delta] = []
        self._plan: StepPlan | None = None
        self._planned: list[Sequence] = []
        self._num_rows = 0
        self._limits = StepLimits(max_num_batched_tokens)
        self._next_seq_id = 0
        self._next_step_id = 0

    def add(self, request: Request, *, seed: int, max_total_tokens: int, pin_prompt: bool = False) -> list[Sequence]:
        """Take a request in: one sequence for each of its ``n`` choices, the choice's index mixed into its seed.

        ``max_total_tokens`` bounds prompt and output together; the caller has checked that the store can hold that
        many. ``pin_prompt`` keeps the full blocks of the prompt for good once they are computed: a declared shared
        prefix, which others wait for and which waits for none.
        """
        sequences = []
        for index in range(request.params.n):
            sequence = Sequence(
                self._next_seq_id,
                request,
                index,
                choice_seed(seed, index),
                max_total_tokens,
                end_token_ids=end_tokens(request.params, self.eos_token_ids),
            )
            self._next_seq_id += 1
            sequence.urgent = pin_prompt
            self.waiting.add(sequence)
            sequences.append(sequence)
        if pin_prompt:
            self.residents.pin_prompt(request.request_id)
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
        batched = self.policy.run_to_completion
        evicted = self.residents.grow(None if batched else self._limits.num_tokens)
        for sequence in evicted:
            self.waiting.add(sequence)
        admitted: tuple[Sequence, ...] = ()
        reason = ""
        if self.waiting and (not self.running or not (batched or evicted)):
            admitted, reason = self._admit(now)
        plan = self._make_plan(admitted, reason)
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
        deltas = []
        for sequence in self._planned:
            if sequence.status is SequenceStatus.RUNNING:  # or else it left while the step ran
                delta = self._note_result(sequence, result, now)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def fail(self, error: Exception, now: float) -> list[Delta]:
        """The last plan failed as a whole.

        Out of memory with company, or with more than one token: the sequences go back to the queue and come again in
        steps half as large, so that what fits alone is served. Any other fault, or a sequence that does not fit alone,
        ends the sequences of the plan.
        """
        plan, self._plan = self._plan, None
        victims = [s for s in self._planned if s.status is SequenceStatus.RUNNING] if plan is not None else []
        for sequence in self.residents.evicted:
            self.residents.drop_swapped(sequence)  # nobody knows how far the copying had come
        # a padded batch computes the rows that have ended too, so the last one may fit where all of them did not
        rows = plan.num_rows if plan is not None and plan.run_to_completion else len(victims)
        divisible = rows > 1 or (plan is not None and plan.num_tokens > 1 and not plan.run_to_completion)
        if isinstance(error, OutOfMemoryError) and victims and divisible:
            self._limits.shrink(rows, plan.num_tokens if plan is not None else 1)
            for sequence in victims:
                self.residents.preempt(sequence, swap=False)
                self.waiting.add(sequence)
            return []
        if not isinstance(error, MicrobatchError):
            error = ExecutionError(f"the model failed on the batch of this request: {type(error).__name__}: {error}")
        return [self._end(s, FinishReason.ERROR, now, error) for s in victims]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks, in the order they came in."""
        return self.residents.sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def num_free_seats(self) -> int:
        """Sequences that could join what runs at the next step: they wait for the step, not for a place."""
        return max(0, int(self.policy.parameters().get("max_num_seqs", 0)) - self.num_running)

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs and the executor has been told of every end."""
        return not self.running and not self.waiting and not self.residents.has_released

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when sequences, requests and blocks do not add up."""
        self.waiting.check_integrity()
        self.kv.check_integrity()
        live = {s.seq_id for s in self.waiting} | {s.seq_id for s in self.running}
        known = {s.seq_id for request_id in self._requests for s in self._requests.open_sequences(request_id)}
        assert live == known, f"sequences lost or left over: {live ^ known}"
        swapped = [s.seq_id for s in self.waiting if s.num_swapped_tokens]
        assert len(swapped) == self.kv.num_swapped, f"{self.kv.num_swapped} sequences in host memory, not {swapped}"
        self.residents.check_integrity()

    def __repr__(self) -> str:
        free, total = self.kv.num_free_blocks, self.kv.num_blocks
        return f"<Scheduler waiting={self.num_waiting} running={self.num_running} blocks={total - free}/{total}>"

    # ---- inside

    def _expire(self, now: float) -> None:
        for sequences in self._requests.expired(now):
            request_id = sequences[0].request.request_id
            self._deltas += self.abort(request_id, now, deadline_error(sequences, now))

    def _admit(self, now: float) -> tuple[tuple[Sequence, ...], str]:
        """Let the policy's choice in as far as blocks, and between steps also tokens, reach; why the batch closed."""
        decision = self.policy.decide(SchedulerView(self.waiting.view(), self.num_running, self.draining), now)
        self.wake_at = decision.wake_at
        wanted = decision.admit[: self._limits.room(self.num_running)]
        budget = None
        if not self.policy.run_to_completion:
            budget = self._limits.num_tokens - sum(s.num_scheduled_tokens for s in self.running)
        admitted, stuck = self._admission.admit(wanted, budget, now)
        if stuck is not None and not self.running:
            self._refuse(stuck, now)
        whole = stuck is None and len(wanted) == len(decision.admit)
        return admitted, decision.reason if whole else "memory"

    def _refuse(self, sequence: Sequence, now: float) -> None:
        """Nothing runs and still it does not fit: it never will, so it must not wait for ever."""
        needed, total = self.kv.blocks_needed(sequence.num_tokens), self.kv.num_blocks
        error = ExecutionError(f"the sequence needs {needed} K/V blocks, the store has {total} and cannot free enough")
        self._deltas.append(self._end(sequence, FinishReason.ERROR, now, error))

    def _make_plan(self, admitted: tuple[Sequence, ...], reason: str) -> StepPlan | None:
        if not self.running and not self.residents.has_released:
            return None
        if admitted or not self.running:
            self._num_rows = len(self.running)
        self._planned = [s for s in self.running if s.num_scheduled_tokens]
        swap_out, swap_in = self.kv.take_swaps()
        self._plan = StepPlan(
            step_id=self._next_step_id,
            sequences=tuple([sequence_step(s) for s in self._planned]),
            admitted=tuple([admission(s) for s in admitted]),
            released=self.residents.take_released(),
            run_to_completion=self.policy.run_to_completion,
            num_rows=self._num_rows,
            reason=reason if admitted else "",
            swap_out=swap_out,
            swap_in=swap_in,
            copies=self.kv.take_copies(),
        )
        self._next_step_id += 1
        return self._plan

    def _take_plan(self, step_id: int) -> StepPlan:
        plan, self._plan = self._plan, None
        if plan is None or plan.step_id != step_id:
            raise ValueError(
                f"result of step {step_id} does not belong to the plan that runs ({plan and plan.step_id})"
            )
        return plan

    def _note_result(self, sequence: Sequence, result: StepResult, now: float) -> Delta | None:
        """Advance one sequence by what it was fed. Runs for every sequence in every step, so it calls little."""
        computed = sequence.num_computed_tokens + sequence.num_scheduled_tokens
        whole = computed == len(sequence.token_ids)
        samples = whole and not sequence.prompt_only
        token_id = result.token_ids.get(sequence.seq_id)
        if (result.errors or samples and token_id is None) and (problem := result.problem(sequence.seq_id, samples)):
            return self._end(sequence, FinishReason.ERROR, now, ExecutionError(problem))
        if (scores := result.prompt_logprobs.get(sequence.seq_id)) is not None:
            start = sequence.num_computed_tokens
            sequence.prompt_logprobs[start : start + len(scores)] = scores
        sequence.num_computed_tokens = computed
        if computed >= sequence.next_full or self.residents.to_pin:
            self.residents.share_full_blocks(sequence)
        if token_id is not None and samples:
            return self._advance(sequence, token_id, result.logprobs, now)
        return self._end(sequence, FinishReason.LENGTH, now, None) if whole else None

    def _advance(self, sequence: Sequence, token_id: int, logprobs: Mapping[int, TokenLogprobs], now: float) -> Delta:
        sequence.append(token_id)
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        if token_id in sequence.end_token_ids:  # stop, also when it is the last token that the limits allow
            return self._end(sequence, FinishReason.STOP, now, None)
        reason = None
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            reason = FinishReason.LENGTH
            self._end(sequence, reason, now, None)
        return Delta(sequence.seq_id, token_id, logprobs.get(sequence.seq_id), reason)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: Exception | None) -> Delta:
        if sequence.status is SequenceStatus.RUNNING:
            self.residents.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.residents.drop_swapped(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.finish_time = now
        if self._requests.note_end(sequence):
            self.residents.forget(sequence.request.request_id)
        return Delta(sequence.seq_id, finish_reason=reason, error=error)
