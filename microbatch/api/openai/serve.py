"""From accepted prompts to an answer: submit all or none, then one body or a stream of chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from microbatch.api.disconnect import gather, while_connected
from microbatch.api.errors import json_response
from microbatch.api.openai.render import Renderer
from microbatch.api.openai.schema import SamplingFields
from microbatch.api.openai.timings import queue_header, timings_body, wants_timings
from microbatch.api.ports import ServingEngine
from microbatch.api.sse import Emit, EventStream
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.engine.outputs import RequestOutput
from microbatch.engine.stream import RequestStream
from microbatch.errors import ExecutionError, InvalidRequestError, QueueFullError, UnavailableError


async def serve(
    request: Request,
    engine: ServingEngine,
    body: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    renderer: Renderer,
) -> Response:
    """Submit the prompts and answer. Raises what refuses them, before anything has been sent."""
    _check_room(engine, len(prompts) * params.n)
    streams: list[RequestStream] = []
    try:
        for index, prompt in enumerate(prompts):
            stream = engine.submit(
                prompt,
                params,
                request_id=f"{renderer.answer_id}-{index}",
                priority=body.priority or 0,
                client=request.scope.get("state", {}).get("client", ""),
                cache_salt=body.cache_salt or "",
            )
            streams.append(stream)
    except BaseException:
        _abort(streams)
        raise
    renderer.begin(streams)
    timed = wants_timings(request)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(functools.partial(_stream, streams, renderer, include_usage, timed))
    outputs = await while_connected(request.receive, lambda: _collect(streams))
    answer = renderer.body(outputs)
    if not timed:
        return json_response(answer)
    timings = timings_body(output.timings for output in outputs)
    return json_response({**answer, "timings": timings}, headers=queue_header(timings))


def _check_room(engine: ServingEngine, wanted: int) -> None:
    """All prompts or none: what can never fit is the request's fault, what does not fit now may come again."""
    numbers = engine.statistics()
    if wanted > numbers.max_queue:
        raise InvalidRequestError(
            f"prompts times n is {wanted}; at most {numbers.max_queue} can wait at once", param="prompt"
        )
    if wanted > 1 and numbers.num_waiting + wanted > numbers.max_queue:
        raise QueueFullError(
            f"the queue has no room for {wanted} more: {numbers.num_waiting} of {numbers.max_queue} places are taken",
            retry_after=1,
        )


async def _collect(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """All outputs; what still runs is aborted when one fails or the wait is cancelled."""

    async def collect(stream: RequestStream) -> RequestOutput:
        output = await stream.collect()
        for choice in output.choices:
            _check_end(choice.finish_reason)
        return output

    try:
        return await gather([functools.partial(collect, stream) for stream in streams])
    finally:
        _abort(streams)


async def _stream(
    streams: Sequence[RequestStream], renderer: Renderer, include_usage: bool, timed: bool, emit: Emit
) -> None:
    """Send chunks of all streams as they come, then the usage and the timings."""

    async def pump(index: int, stream: RequestStream) -> None:
        failed: FinishReason | None = None
        async for delta in stream:
            for chunk in renderer.chunks(index, delta):
                await emit(chunk)
            failed = delta.finish_reason if delta.finish_reason in _NOT_TOLD else failed
        _check_end(failed)

    try:
        await gather([functools.partial(pump, index, stream) for index, stream in enumerate(streams)])
    finally:
        _abort(streams)
    if include_usage or timed:
        await emit(_last_chunk(streams, renderer, include_usage, timed))


def _last_chunk(
    streams: Sequence[RequestStream], renderer: Renderer, include_usage: bool, timed: bool
) -> dict[str, object]:
    chunk = renderer.usage_chunk(stream.usage() for stream in streams)
    if not include_usage:
        del chunk["usage"]
    if timed:
        chunk["timings"] = timings_body(stream.timings() for stream in streams)
    return chunk


_NOT_TOLD = (FinishReason.ABORT, FinishReason.ERROR)


def _check_end(reason: FinishReason | None) -> None:
    """An answer that was cut off is never told as a finished one."""
    if reason is FinishReason.ABORT:
        raise UnavailableError("the server aborted the request", code="aborted")
    if reason is FinishReason.ERROR:
        raise ExecutionError("the request failed")


def _abort(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()
