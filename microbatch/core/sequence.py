"""One answer in flight: a request, or one of its ``n`` choices, and how far it has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from microbatch.core.plan import TokenLogprobs
from microbatch.core.request import FinishReason, Request, SamplingParams


class SequenceStatus(enum.Enum):
    """WAITING sequences hold no blocks (a preempted one waits again); RUNNING ones do; FINISHED ones never change."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress is one counter: ``num_computed_tokens`` = K/V is written for positions [0, n).

    Prefill, prefix hit, decode and recompute are all "feed tokens [n, m)". Times are seconds on the engine's clock.
    ``params``, ``num_prompt_tokens`` and ``token_ids`` are read for every sequence in every step, so they are kept
    here and not asked of the request; ``append`` keeps both lists of tokens.
    """

    seq_id: int
    request: Request
    index: int
    seed: int
    max_total_tokens: int
    #: Tokens that end it and are not shown.
    end_token_ids: frozenset[int] = frozenset()
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None
    #: Tokens that the newest plan feeds.
    num_scheduled_tokens: int = 0
    #: Tokens whose K/V waits in host memory; the sequence was swapped out.
    num_swapped_tokens: int = 0
    #: Its block table, and the tokens that it has room for.
    block_ids: tuple[int, ...] = ()
    num_slots: int = 0
    #: Its batch need not wait for others.
    urgent: bool = False
    #: With so many tokens computed, the next block is full and can be shared.
    next_full: int = 0
    #: Log-probabilities of the prompt from its second token on, as far as they are known, if they are asked for.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Nothing is to be generated: it ends when its prompt is computed.
    prompt_only: bool = field(init=False)
    #: The request's sampling parameters.
    params: SamplingParams = field(init=False)
    #: Length of the prompt in tokens.
    num_prompt_tokens: int = field(init=False)
    #: Prompt and output tokens, in order.
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.prompt_only = self.max_total_tokens <= self.num_prompt_tokens
        self.token_ids = [*self.request.prompt_token_ids, *self.output_token_ids]

    def append(self, token_id: int) -> None:
        """A new token of the output."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)

    @property
    def arrival_time(self) -> float:
        """When the request arrived; a preempted sequence keeps it, so it comes first again."""
        return self.request.arrival_time

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found, which takes a forward over all of it. The
        first choice finds them for all choices of a request."""
        if self.params.prompt_logprobs is None or self.index:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_computed(self) -> bool:
        """Whether K/V of the whole prompt is written and held."""
        return self.status is SequenceStatus.RUNNING and self.num_computed_tokens >= self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.seq_id} {self.status.value} prompt={self.num_prompt_tokens}"
            f" output={len(self.output_token_ids)} computed={self.num_computed_tokens}>"
        )
