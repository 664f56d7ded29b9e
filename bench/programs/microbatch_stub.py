"""Our server over stand-ins for the model: every token is ``~``, ``RATE`` tokens a second in all (0: all it can).

    python microbatch_stub.py PORT RATE SEQUENCES whole|http

``whole``: the real engine over a ``FakeExecutor``. ``http``: in the engine's place a task that hands each stream one
token a round, so that what is left is the HTTP layer and the streams alone.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from event_loop_lag import EventLoopLag
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from microbatch.api.app import create_app
from microbatch.connection import Connection
from microbatch.core.plan import Delta, StepPlan
from microbatch.core.policies import make_policy
from microbatch.core.request import FinishReason
from microbatch.core.sequence import Sequence as Running
from microbatch.engine.client import AsyncEngine
from microbatch.engine.stream import RequestStream
from microbatch.executor.fake import FakeExecutor, constant
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager

TOKEN = ord("~")
_CONTEXT = 16384
_BLOCK = 256


class Pace:
    """The latency of a step that makes ``rate`` tokens a second come true over all steps."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due = 0.0

    def seconds(self, tokens: int) -> float:
        """How long to wait before so many tokens are told."""
        if not self._rate:
            return 0.0
        now = time.perf_counter()
        self._due = max(self._due, now - 0.05) + tokens / self._rate
        return max(0.0, self._due - now)

    def latency(self, plan: StepPlan) -> float:
        """The same for a plan."""
        return self.seconds(len(plan.sequences))


def whole_engine(rate: float, sequences: int) -> AsyncEngine:
    """The real engine under the ``continuous`` policy."""
    executor = FakeExecutor(constant(TOKEN), block_size=_BLOCK, latency=Pace(rate).latency, remember=False)
    policy = make_policy("continuous", {"max_num_seqs": sequences})
    kv = PagedKVManager(sequences * _CONTEXT // _BLOCK + 64, _BLOCK)
    return AsyncEngine(
        lambda: assemble(executor, kv, policy, ByteTokenizer(), model_name="m", max_model_len=_CONTEXT), model_name="m"
    )


class StreamsOnly(AsyncEngine):
    """Accepts what a real engine does, but no scheduler and no executor run: ``feed`` gives every stream its tokens."""

    def __init__(self, rate: float, sequences: int) -> None:
        inner = whole_engine(0, sequences)
        super().__init__(inner._build, model_name="m")
        self._pace = Pace(rate)
        self._fed: dict[RequestStream, Running] = {}

    def submit(self, prompt_token_ids: Sequence[int], *args: Any, **options: Any) -> RequestStream:
        stream = super().submit(prompt_token_ids, *args, **options)
        request = replace(stream.request)
        self._fed[stream] = Running(0, request, 0, seed=0, max_total_tokens=_CONTEXT)
        return stream

    async def feed(self) -> None:
        """For ever: one token for each stream."""
        while True:
            await asyncio.sleep(self._pace.seconds(len(self._fed)) if self._fed else 0.001)
            for stream, sequence in list(self._fed.items()):
                sequence.output_token_ids.append(TOKEN)
                ends = len(sequence.output_token_ids) >= (stream.request.params.max_tokens or _CONTEXT)
                stream.push(sequence, Delta(0, TOKEN, None, FinishReason.LENGTH if ends else None))
                stream.wake()
                if ends:
                    del self._fed[stream]


async def main(port: int, rate: float, sequences: int, mode: str) -> None:
    """Serve until the process is ended."""
    engine = StreamsOnly(rate, sequences) if mode == "http" else whole_engine(rate, sequences)
    app = create_app(engine)
    lag = EventLoopLag()

    async def tell(request: Request) -> JSONResponse:
        return JSONResponse(lag.figures())

    app.router.routes.append(Route("/lag", tell))
    await engine.start()
    if isinstance(engine, StreamsOnly):
        engine.parts.loop.submit = lambda *args, **options: None  # type: ignore[method-assign]
        feeding = asyncio.create_task(engine.feed())
    config = uvicorn.Config(app, port=port, log_level="error", access_log=False, lifespan="off", http=Connection)
    await uvicorn.Server(config).serve()
    if isinstance(engine, StreamsOnly):
        feeding.cancel()
    await engine.close()


if __name__ == "__main__":
    uvicorn_loop = uvicorn.Config("", loop="auto").get_loop_factory() or asyncio.new_event_loop
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        runner.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
