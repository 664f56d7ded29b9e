"""How long a request has taken, for clients that ask by ``X-Include-Timings: true``.

The answer, or the last chunk of a stream, then has ``timings``: ``queue_ms`` from the arrival to the first step,
``ttft_ms`` to the first token, ``e2e_ms`` to the end; null for what never happened. Of several prompts the longest of
each. An answer that is not a stream also has the header ``X-Queue-Time-Ms``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.requests import Request

from microbatch.engine.outputs import Timings

HEADER: Final = "x-include-timings"
QUEUE_HEADER: Final = "X-Queue-Time-Ms"


def wants_timings(request: Request) -> bool:
    """Whether the client has asked."""
    return request.headers.get(HEADER, "").strip().lower() in ("true", "1")


def timings_body(timings: Iterable[Timings]) -> dict[str, float | None]:
    """The ``timings`` of one answer."""
    parts = list(timings)
    return {
        "queue_ms": _longest(part.queue for part in parts),
        "ttft_ms": _longest(part.ttft for part in parts),
        "e2e_ms": _longest(part.e2e for part in parts),
    }


def queue_header(timings: dict[str, float | None]) -> dict[str, str]:
    """The header that tells the time in the queue."""
    queue = timings["queue_ms"]
    return {} if queue is None else {QUEUE_HEADER: f"{queue:g}"}


def _longest(seconds: Iterable[float | None]) -> float | None:
    known = [second for second in seconds if second is not None]
    return round(max(known) * 1000, 3) if known else None
