"""An executor without a model: scripted tokens, latencies and faults, and a K/V store that remembers tokens.

It writes each token it is fed into the slot that the block table names, moves blocks as the plan says, and reads the
context back through the table to choose the next token. A block given to two sequences, freed too early, shared or
swapped wrongly therefore changes the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from microbatch.core.plan import SequenceStep, StepPlan, StepResult, TokenLogprobs
from microbatch.executor.prompt_targets import PromptTargets

NextToken = Callable[[Sequence[int], SequenceStep], int]


def echo_sum(context: Sequence[int], step: SequenceStep) -> int:
    """A token from 3 to 249 that depends on every token of the context and on their order."""
    value = 7
    for token_id in context:
        value = (value * 31 + token_id + 1) % 1_000_003
    return 3 + value % 247


def constant(token_id: int) -> NextToken:
    """Always the same token; it needs no context."""
    return lambda context, step: token_id


class FakeExecutor:
    """Implements ``core.ports.Executor``.

    ``next_token(context, step)`` chooses tokens. ``latency(plan)`` is slept in seconds before the result;
    ``fault(plan)`` may return an exception to raise; ``row_errors(plan)`` gives errors by seq_id in the place of
    tokens. With ``remember=False`` no store is kept and ``context`` is empty: for benches that measure everything
    else.
    """

    def __init__(
        self,
        next_token: NextToken = echo_sum,
        *,
        block_size: int = 16,
        latency: Callable[[StepPlan], float] | None = None,
        fault: Callable[[StepPlan], BaseException | None] | None = None,
        row_errors: Callable[[StepPlan], dict[int, str]] | None = None,
        remember: bool = True,
    ) -> None:
        self.plans: list[StepPlan] = []
        self.resets = 0
        self.closed = False
        self._next_token = next_token
        self._block_size = block_size
        self._latency = latency
        self._fault = fault
        self._row_errors = row_errors
        self._remember = remember
        self._slots: dict[int, int] = {}
        self._host_slots: dict[int, int] = {}
        self._targets = PromptTargets()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan; raises the scripted fault, if any, after the tokens were written."""
        if self._remember:
            self.plans.append(plan)
            self._copy(self._slots, self._host_slots, plan.swap_out)
            self._copy(self._host_slots, self._slots, plan.swap_in)
            self._copy(self._slots, self._slots, plan.copies)
        self._targets.follow(plan)
        contexts = {s.seq_id: self._feed(s) for s in plan.sequences}
        if self._latency is not None:
            time.sleep(self._latency(plan))
        error = self._fault(plan) if self._fault is not None else None
        if error is not None:
            raise error
        errors = self._row_errors(plan) if self._row_errors is not None else {}
        samples = [s for s in plan.sequences if s.samples and s.seq_id not in errors]
        token_ids = {s.seq_id: self._next_token(contexts[s.seq_id], s) for s in samples}
        logprobs = {s.seq_id: _logprobs(s, token_ids[s.seq_id]) for s in samples if s.params.logprobs is not None}
        prompts = {s.seq_id: prompt_scores(t, s.start) for s in plan.sequences if (t := self._targets.of(s))}
        return StepResult(plan.step_id, token_ids, logprobs, errors, prompts)

    def reset(self) -> None:
        """Counted, nothing else."""
        self.resets += 1

    def close(self) -> None:
        """Noted, nothing else."""
        self.closed = True

    def _copy(self, source: dict[int, int], target: dict[int, int], pairs: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, as they are: a slot that was never written is empty in the copy too."""
        for source_id, target_id in pairs:
            for offset in range(self._block_size):
                token_id = source.get(source_id * self._block_size + offset)
                target.pop(target_id * self._block_size + offset, None)
                if token_id is not None:
                    target[target_id * self._block_size + offset] = token_id

    def _feed(self, step: SequenceStep) -> list[int]:
        if not self._remember:
            return []
        for position, token_id in enumerate(step.token_ids, start=step.start):
            self._slots[self._slot(step, position)] = token_id
        return [self._slots[self._slot(step, p)] for p in range(step.start + len(step.token_ids))]

    def _slot(self, step: SequenceStep, position: int) -> int:
        block_id = step.block_ids[position // self._block_size]
        if block_id == 0:
            raise AssertionError(f"sequence {step.seq_id} uses the null block")
        return block_id * self._block_size + position % self._block_size


def _logprobs(step: SequenceStep, token_id: int) -> TokenLogprobs:
    top = tuple((token_id + i, -0.5 - i) for i in range(step.params.logprobs or 0))
    return TokenLogprobs(-0.5, top)


def prompt_scores(targets: Sequence[int], start: int) -> tuple[TokenLogprobs, ...]:
    """What the fake says of prompt tokens that are predicted at the positions from ``start`` on."""
    return tuple(TokenLogprobs(-(t % 10) - p / 1000, ((t, -0.25),), rank=2) for p, t in enumerate(targets, start))
