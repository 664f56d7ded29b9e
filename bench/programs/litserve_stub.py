"""LitServe with its ``OpenAISpec`` over a stand-in for the model: every token is ``~``; all streams step together.

    python litserve_stub.py PORT RATE SEQUENCES

``predict`` is a generator, as in LitServe's streaming examples. Its batched streaming does not go with its
``OpenAISpec``, so streams step side by side by ``enable_async``, the only way it has for that.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import litserve
from event_loop_lag import EventLoopLag


class Stub(litserve.LitAPI):  # type: ignore[misc]
    """Streams as many tokens as a request asks for."""

    rate = 0.0
    sequences = 64

    def setup(self, device: str) -> None:
        """Nothing to load."""

    async def decode_request(self, request: Any) -> int:
        """How many tokens to stream."""
        return int(request.max_tokens)

    async def predict(self, tokens: int) -> AsyncIterator[str]:
        """One token a step; each stream has its share of the rate."""
        due = time.perf_counter()
        for _ in range(tokens):
            due = max(due, time.perf_counter() - 0.05) + (self.sequences / self.rate if self.rate else 0.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            yield "~"

    async def encode_response(self, output: AsyncIterator[str]) -> AsyncIterator[dict[str, str]]:
        """A delta a token."""
        async for text in output:
            yield {"role": "assistant", "content": text}


if __name__ == "__main__":
    api = Stub(spec=litserve.OpenAISpec(), enable_async=True)
    api.rate, api.sequences = float(sys.argv[2]), int(sys.argv[3])  # of the object: it is sent to another process
    server = litserve.LitServer(api, accelerator="cpu", timeout=False, track_requests=False)
    lag = EventLoopLag()

    server.app.add_api_route("/lag", lag.figures_soon)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="error")
