"""So many requests and so many tokens a minute for each client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from microbatch.api.token_bucket import TokenBucket
from microbatch.engine.stats import Observer, RequestRecord
from microbatch.errors import RateLimitError

#: Clients that are remembered at once. Beyond it those with full buckets are forgotten first, then the oldest.
MAX_CLIENTS: Final = 10_000


@dataclass(slots=True)
class _Client:
    requests: TokenBucket | None
    tokens: TokenBucket | None


@dataclass(slots=True)
class RateLimiter(Observer):
    """Refuses what is over a client's rate. None: no limit.

    Tokens are those of prompts and answers. A request reserves the most that it may use; what it has not used comes
    back when it ends, which the limiter, as an observer of the engine, is told in every case.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    clock: Callable[[], float] = time.monotonic
    #: Told of every refusal.
    refused: Callable[[], None] = lambda: None
    _clients: dict[str, _Client] = field(default_factory=dict)
    _reserved: dict[str, tuple[str, int]] = field(default_factory=dict)

    def admit(self, client: str, tokens: Mapping[str, int]) -> None:
        """One HTTP request with the most tokens of each of its engine requests, by id. Raises ``RateLimitError``."""
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            return
        now, buckets, total = self.clock(), self._client(client), sum(tokens.values())
        for bucket, amount, what in ((buckets.requests, 1, "requests"), (buckets.tokens, total, "tokens")):
            if bucket is not None and (seconds := bucket.wait(amount, now)) > 0:
                limit = self.requests_per_minute if what == "requests" else self.tokens_per_minute
                self.refused()
                raise RateLimitError(
                    f"over the limit of {limit} {what} a minute; try again in {math.ceil(seconds)} s",
                    retry_after=math.ceil(seconds),
                )
        if buckets.requests is not None:
            buckets.requests.take(1)
        if buckets.tokens is not None:
            buckets.tokens.take(total)
            self._reserved.update((request_id, (client, count)) for request_id, count in tokens.items())

    def settle(self, request_id: str, used: int = 0) -> None:
        """An engine request has ended with so many tokens, or was refused; unknown ids are left alone."""
        client, reserved = self._reserved.pop(request_id, ("", 0))
        buckets = self._clients.get(client)
        if buckets is not None and buckets.tokens is not None:
            buckets.tokens.give_back(max(0, reserved - used))

    def request_finished(self, record: RequestRecord) -> None:
        """Give back what was reserved and not used."""
        self.settle(record.request_id, record.prompt_tokens + record.completion_tokens)

    def _client(self, name: str) -> _Client:
        if name not in self._clients:
            now = self.clock()
            if len(self._clients) >= MAX_CLIENTS:
                self._forget(now)
            self._clients[name] = _Client(
                TokenBucket(self.requests_per_minute, now) if self.requests_per_minute is not None else None,
                TokenBucket(self.tokens_per_minute, now) if self.tokens_per_minute is not None else None,
            )
        return self._clients[name]

    def _forget(self, now: float) -> None:
        full = [
            name
            for name, client in self._clients.items()
            if all(bucket is None or bucket.is_full(now) for bucket in (client.requests, client.tokens))
        ]
        for name in full or list(self._clients)[: MAX_CLIENTS // 10]:
            del self._clients[name]
