"""Log-probabilities of the tokens of prompts, beside the forward that computes the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from microbatch.core.plan import SequenceStep, StepPlan, TokenLogprobs
from microbatch.executor import vocabulary
from microbatch.executor.head import Head
from microbatch.executor.prompt_targets import PromptTargets

#: Logits that are held at once: 32 MiB as float32, and about twice that beside them.
_SLICE: Final = 2**23


class PromptScores:
    """Those of the sequences that ask for them. Costs nothing in a step without any.

    ``with scores.watch(steps): model(...)`` and then, still inside, ``score`` for each of ``wanted``.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._rows = max(1, _SLICE // vocab_size)
        self._targets = PromptTargets()
        self._head: Head | None = None
        self.errors: dict[int, str] = {}
        self.found: dict[int, tuple[TokenLogprobs, ...]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Call it with every plan, in order."""
        self._targets.follow(plan)
        self.errors, self.found = {}, {}

    def wanted(self, steps: Sequence[SequenceStep]) -> list[int]:
        """The places in ``steps`` of those whose prompts are scored in this step."""
        return [place for place, step in enumerate(steps) if self._targets.of(step)] if self._targets else []

    def watch(self) -> AbstractContextManager[None]:
        """Hold the hidden states of the forward inside."""
        self._head = self._head or Head(self._model)
        return self._head.watch()

    @property
    def hidden(self) -> torch.Tensor | None:
        """Of the last forward, ``[B, T, H]``, inside ``watch``."""
        return None if self._head is None else self._head.hidden

    def check(self, hidden: torch.Tensor | None, logits: torch.Tensor) -> bool:
        """Whether the head can be run apart, tried on one position."""
        return self._head is not None and hidden is not None and self._head.fits(hidden, logits)

    def refuse(self, step: SequenceStep) -> None:
        """The head of this model cannot be run apart."""
        self.errors[step.seq_id] = "log-probabilities of the prompt are not supported for this model"

    def score(self, step: SequenceStep, hidden: torch.Tensor) -> None:
        """Of one sequence; ``hidden`` ``[L, H]`` of the positions that the step feeds."""
        assert self._head is not None
        targets = torch.tensor(self._targets.of(step), device=hidden.device)
        scores: list[TokenLogprobs] = []
        for start in range(0, len(targets), self._rows):
            part = targets[start : start + self._rows]
            scores += _scores(self._head.logits(hidden[start : start + len(part)]), part, step.params.prompt_logprobs)
        if any(score.logprob != score.logprob for score in scores):
            self.errors[step.seq_id] = "the model gave logits that are not numbers for this request"
        else:
            self.found[step.seq_id] = tuple(scores)


def _scores(logits: torch.Tensor, targets: torch.Tensor, count: int | None) -> list[TokenLogprobs]:
    logits = logits.float()
    targets = targets.to(logits.device)[:, None]
    chosen = logits.gather(1, targets)
    ranks = (logits > chosen).sum(-1).add_(1).tolist()
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = vocabulary.top(logits, min(count, logits.shape[1])) if count else (chosen[:, :0], targets[:, :0])
    rows = zip((chosen - total)[:, 0].tolist(), ids.tolist(), (values - total).tolist(), ranks)
    return [TokenLogprobs(logprob, tuple(zip(i, v)), rank) for logprob, i, v, rank in rows]
