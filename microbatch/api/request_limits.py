"""What one request may ask for, as far as the operator narrows it."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.core.request import MAX_N, MAX_STOPS, SamplingParams
from microbatch.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most choices and most stop texts of a request."""

    max_n: int = MAX_N
    max_stop: int = MAX_STOPS

    def check(self, params: SamplingParams, best_of: int | None = None) -> None:
        """Raise ``InvalidRequestError`` that names the limit."""
        for name, choices in (("n", params.n), ("best_of", best_of or 1)):
            if choices > self.max_n:
                raise InvalidRequestError(f"{name} is at most {self.max_n} on this server, got {choices}", param=name)
        if len(params.stop) > self.max_stop:
            raise InvalidRequestError(
                f"stop takes at most {self.max_stop} texts on this server, got {len(params.stop)}", param="stop"
            )
