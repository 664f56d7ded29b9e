"""Random lives of the scheduler over an executor that remembers what was written where.

Whatever arrives, leaves, fails, is forked, preempted or swapped: every sequence ends once, its tokens are those of a
run alone, and at the end every block is free, on the device and in host memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from microbatch.core.plan import SequenceStep
from microbatch.core.policies import ContinuousPolicy, SerialPolicy, WindowPolicy
from microbatch.core.policy import Policy
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.errors import OutOfMemoryError
from microbatch.executor.fake import FakeExecutor, echo_sum
from tests.core.factory import EOS, request, scheduler

STOPS = (EOS, 40, 41, 42, 43, 44, 45)


def alone(sequence: Sequence) -> list[int]:
    """The tokens that the fake gives a sequence that runs by itself."""
    return answer(sequence.request.prompt_token_ids, sequence.max_total_tokens)


@cache
def answer(prompt: tuple[int, ...], max_total_tokens: int) -> list[int]:
    step = SequenceStep(0, (), 0, (), True, SamplingParams())
    tokens = list(prompt)
    output: list[int] = []
    while len(tokens) < max_total_tokens:
        tokens.append(echo_sum(tokens, step))
        output.append(tokens[-1])
        if output[-1] in STOPS:
            break
    return output


class Lives(RuleBasedStateMachine):
    """One scheduler, one fake, a clock that only moves forward. Host memory holds a sequence or two."""

    policy: Policy = WindowPolicy(max_batch_size=3, window_ms=50)
    options: dict[str, Any] = {"num_host_blocks": 7}

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler = scheduler(num_blocks=9, block_size=4, policy=self.policy, **self.options)
        self.scheduler.eos_token_ids = frozenset(STOPS)
        self.executor = FakeExecutor(block_size=4)
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.ends: dict[int, FinishReason] = {}
        self.faulty: set[int] = set()

    @rule(
        prompt=st.lists(st.sampled_from([5, 6]), min_size=1, max_size=14),
        tokens=st.integers(1, 16),
        n=st.integers(1, 3),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def arrive(self, prompt: list[int], tokens: int, n: int, salt: str) -> None:
        r = request(f"r{len(self.sequences)}", prompt, self.now, max_tokens=tokens, n=n, options={"cache_salt": salt})
        for sequence in self.scheduler.add(r, seed=1, max_total_tokens=len(prompt) + tokens):
            self.sequences[sequence.seq_id] = sequence

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.now += ms / 1000

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        if self.sequences:
            sequence = list(self.sequences.values())[pick % len(self.sequences)]
            self._note(self.scheduler.abort(sequence.request.request_id, self.now))

    @rule(pick=st.integers(0, 50))
    def end_one(self, pick: int) -> None:
        """A stop text was found: one choice ends, the others go on."""
        if self.sequences:
            sequence = list(self.sequences.values())[pick % len(self.sequences)]
            if not sequence.finished:
                self.scheduler.finish(sequence, FinishReason.ABORT, self.now)
                self.ends[sequence.seq_id] = FinishReason.ABORT

    @rule(kind=st.sampled_from(["work"] * 12 + ["oom", "early oom", "fault", "row"]))
    def step(self, kind: str) -> None:
        plan = self.scheduler.schedule(self.now)
        self._note(self.scheduler.take_deltas())
        if plan is None:
            return
        if kind == "early oom" and plan.sequences:  # before anything was copied or written
            self._note(self.scheduler.fail(OutOfMemoryError("full"), self.now))
            return
        result = self.executor.execute(plan)
        if kind == "oom" and plan.sequences:
            self._note(self.scheduler.fail(OutOfMemoryError("full"), self.now))
        elif kind == "fault" and plan.sequences:
            self._note(self.scheduler.fail(RuntimeError("boom"), self.now))
        elif kind == "row" and plan.sequences:
            bad = plan.sequences[0].seq_id
            errors = {bad: "NaN"}
            tokens = {i: t for i, t in result.token_ids.items() if i != bad}
            self._note(self.scheduler.apply(type(result)(result.step_id, tokens, {}, errors), self.now))
        else:
            self._note(self.scheduler.apply(result, self.now))

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def tokens_are_those_of_a_run_alone(self) -> None:
        for sequence in self.sequences.values():
            expected = alone(sequence)
            assert sequence.output_token_ids == expected[: len(sequence.output_token_ids)]
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert sequence.output_token_ids == expected

    def teardown(self) -> None:
        for _ in range(10_000):
            self.now += 0.06
            if self.scheduler.idle:
                break
            self.step("work")
        assert self.scheduler.idle, self.scheduler
        assert self.scheduler.kv.num_free_blocks == self.scheduler.kv.num_blocks
        assert self.scheduler.kv.num_swapped == 0
        assert set(self.ends) == set(self.sequences), "a sequence was lost or left hanging"

    def _note(self, deltas: list) -> None:  # type: ignore[type-arg]
        for delta in deltas:
            assert delta.seq_id not in self.ends, f"sequence {delta.seq_id} had news after its end"
            if delta.finish_reason is not None:
                self.ends[delta.seq_id] = delta.finish_reason


class SerialLives(Lives):
    """The same under the serial policy."""

    policy = SerialPolicy()


class ContinuousLives(Lives):
    """Joining and leaving between steps, prompts in chunks of a small token budget, choices that fork."""

    policy = ContinuousPolicy(max_num_seqs=4)
    options = {"max_num_batched_tokens": 6}

    @invariant()
    def no_step_exceeds_the_budget(self) -> None:
        for plan in self.executor.plans[-1:]:
            assert plan.num_tokens <= 6 and len(plan.sequences) <= 4


class SwappingLives(ContinuousLives):
    """The same with a host memory for a sequence or two."""

    options = {"max_num_batched_tokens": 6, "num_host_blocks": 7}


class LonelyLives(ContinuousLives):
    """The same with nothing shared but by fork."""

    options = {"max_num_batched_tokens": 6, "num_host_blocks": 7, "prefix_cache": False}


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
SerialLives.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
ContinuousLives.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
SwappingLives.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
LonelyLives.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLives = Lives.TestCase
TestContinuousLives = ContinuousLives.TestCase
TestSwappingLives = SwappingLives.TestCase
TestLonelyLives = LonelyLives.TestCase
TestSerialLives = SerialLives.TestCase
