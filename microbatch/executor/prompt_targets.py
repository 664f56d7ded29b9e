"""Which tokens of a prompt a step finds the log-probabilities of. Ids only."""

from __future__ import annotations

from microbatch.core.plan import SequenceStep, StepPlan


class PromptTargets:
    """Knows the prompts that are scored, from the plan that a sequence enters with until it leaves."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Call it with every plan, in order."""
        if self._prompts:
            for seq_id in plan.released:
                self._prompts.pop(seq_id, None)
        for admitted in plan.admitted:
            if admitted.scores_prompt:
                self._prompts[admitted.seq_id] = admitted.prompt_token_ids

    def of(self, step: SequenceStep) -> tuple[int, ...]:
        """The prompt tokens behind the positions that the step feeds: the first is predicted at the first of them.
        Fewer than are fed at the end of the prompt, none behind it."""
        prompt = self._prompts.get(step.seq_id)
        return () if prompt is None else prompt[step.start + 1 : step.start + 1 + len(step.token_ids)]

    def __bool__(self) -> bool:
        return bool(self._prompts)
