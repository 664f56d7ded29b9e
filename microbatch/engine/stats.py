"""What the engine tells of itself: numbers on demand, and events to those who observe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from microbatch.core.request import FinishReason, Request
from microbatch.engine.outputs import Timings, Usage


class EngineStatus(NamedTuple):
    """Where the engine is in its life."""

    #: starting, ready, draining, dead or closed
    state: str
    #: why, in a line, where that needs saying
    reason: str = ""


class EngineStatistics(NamedTuple):
    """A snapshot."""

    #: sequences that hold K/V blocks
    num_running: int
    #: sequences that wait, those in the inbox included
    num_waiting: int
    #: blocks of the store
    num_blocks: int
    #: blocks that no sequence and no pinned prefix references
    num_free_blocks: int
    #: share of the blocks in use, 0 to 1
    kv_cache_usage: float
    #: name of the policy
    policy: str
    #: its parameters
    policy_parameters: Mapping[str, float | int | str]
    #: most sequences that may wait
    max_queue: int = 256
    #: bytes of one token's K/V over all layers; 0 where there is no store
    kv_bytes_per_token: int = 0
    #: bytes of all blocks
    kv_cache_bytes: int = 0
    #: share of the slots in blocks that are in use which hold no token, 0 to 1
    kv_fragmentation: float = 0.0
    #: more that may come at this moment, as they can join what runs at the next step
    num_free_seats: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended. Times in seconds, as in ``Timings``; ``tpot_s`` = (e2e - ttft) / (n - 1), None below
    2."""

    request_id: str
    client: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    tpot_s: float | None

    @classmethod
    def make(cls, request: Request, reason: FinishReason, usage: Usage, timings: Timings) -> RequestRecord:
        """From what a stream knows at its end. With several choices, n is the mean number of tokens of one."""
        tokens = usage.completion_tokens / request.params.n
        tpot = None
        if timings.e2e is not None and timings.ttft is not None and tokens >= 2:
            tpot = (timings.e2e - timings.ttft) / (tokens - 1)
        return cls(
            request.request_id,
            request.client,
            reason.value,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            timings.queue,
            timings.ttft,
            timings.e2e,
            tpot,
        )


class Observer:
    """Called on the engine's thread; every method does nothing here. Must be quick and must not raise."""

    def batch_closed(self, reason: str, size: int) -> None:
        """A batch of ``size`` sequences was closed because of size, window, idle, drain or memory."""

    def step_done(self, prompt_tokens: int, generation_tokens: int, useful_token_ratio: float) -> None:
        """A step fed ``prompt_tokens`` of prompts and made ``generation_tokens`` new ones."""

    def token_gaps(self, seconds: float, count: int) -> None:
        """Time between two tokens of one sequence; so it was for ``count`` sequences of a step."""

    def request_finished(self, record: RequestRecord) -> None:
        """A request has ended, whatever the reason."""

    def request_rejected(self, reason: str) -> None:
        """A request was refused at the door: queue_full, context_length, draining or dead."""

    def preempted(self, count: int) -> None:
        """Sequences lost their blocks and will be computed again."""

    def prefix_lookup(self, query_tokens: int, hit_tokens: int, pinned_tokens: int) -> None:
        """Prompts of ``query_tokens`` in all were looked up, ``hit_tokens`` of them were cached, ``pinned_tokens`` of
        these in declared prefixes."""

    def blocks_swapped(self, out: int, back: int) -> None:
        """Blocks were copied to host memory and back."""

    def prompt_forked(self, tokens: int) -> None:
        """Tokens of prompts were taken over from another choice of the same request."""


class Observers(Observer):
    """Passes every event on to a list of observers."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """One more."""
        self._observers.append(observer)

    def batch_closed(self, reason: str, size: int) -> None:
        for observer in self._observers:
            observer.batch_closed(reason, size)

    def step_done(self, prompt_tokens: int, generation_tokens: int, useful_token_ratio: float) -> None:
        for observer in self._observers:
            observer.step_done(prompt_tokens, generation_tokens, useful_token_ratio)

    def token_gaps(self, seconds: float, count: int) -> None:
        for observer in self._observers:
            observer.token_gaps(seconds, count)

    def request_finished(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.request_finished(record)

    def request_rejected(self, reason: str) -> None:
        for observer in self._observers:
            observer.request_rejected(reason)

    def preempted(self, count: int) -> None:
        for observer in self._observers:
            observer.preempted(count)

    def prefix_lookup(self, query_tokens: int, hit_tokens: int, pinned_tokens: int) -> None:
        for observer in self._observers:
            observer.prefix_lookup(query_tokens, hit_tokens, pinned_tokens)

    def blocks_swapped(self, out: int, back: int) -> None:
        for observer in self._observers:
            observer.blocks_swapped(out, back)

    def prompt_forked(self, tokens: int) -> None:
        for observer in self._observers:
            observer.prompt_forked(tokens)
