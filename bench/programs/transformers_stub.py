"""``transformers serve`` over a stand-in for generation: every token is ``~``; the model is loaded and never run.

    python transformers_stub.py PORT RATE SEQUENCES MODEL

Its server, handlers and templates are what they are; only what would generate is replaced: a thread that gives every
stream one token a step, through the same queue that the real one uses.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from event_loop_lag import EventLoopLag
from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils


class Streamer:
    """What a handler asks of its stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: int) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.wanted = wanted
        self.total_tokens = 0

    def step(self) -> bool:
        """One token more, or the end."""
        ends = self.total_tokens >= self.wanted
        self.loop.call_soon_threadsafe(self.queue.put_nowait, None if ends else "~")
        self.total_tokens += not ends
        return ends

    def cancel(self) -> None:
        """The client has left."""
        self.wanted = 0


class StubManager:
    """In the place of the manager that generates."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.streams: list[Streamer] = []
        threading.Thread(target=self._run, daemon=True).start()

    def init_cb(self, *args: Any) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """The thread ends with the process."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **options: Any
    ) -> tuple[asyncio.Queue[str | None], Streamer]:
        """A stream that the thread feeds from now on."""
        stream = Streamer(asyncio.get_running_loop(), gen_config.max_new_tokens)
        self.streams.append(stream)
        return stream.queue, stream

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            streams = list(self.streams)
            due = max(due, time.perf_counter() - 0.05) + (len(streams) / self.rate if self.rate else 0.0)
            time.sleep(max(0.0, due - time.perf_counter()) if streams else 0.001)
            for stream in streams:
                if stream.step():
                    self.streams.remove(stream)


def main(port: int, rate: float, model: str) -> None:
    """Serve until the process is ended."""
    manager = StubManager(rate)
    setattr(utils.GenerationState, "get_manager", lambda self, *args, **options: manager)
    build, lag = server.build_server, EventLoopLag()

    def build_with_lag(*args: Any, **options: Any) -> Any:
        app = build(*args, **options)

        app.add_api_route("/lag", lag.figures_soon)
        return app

    setattr(server, "build_server", build_with_lag)
    Serve(force_model=model, port=port, host="127.0.0.1", device="cpu", continuous_batching=True, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[4])
