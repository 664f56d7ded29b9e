"""From accepted prompts to an answer: submit all or none, then one body or a stream of chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from microbatch.api.disconnect import gather, while_connected
from microbatch.api.errors import json_response
from microbatch.api.event_sender import EventSender
from microbatch.api.openai.render import Renderer
from microbatch.api.openai.schema import SamplingFields
from microbatch.api.openai.timings import queue_header, timings_body, wants_timings
from microbatch.api.ports import ServingEngine
from microbatch.api.rates import RateLimiter
from microbatch.api.sse import EventStream
from microbatch.api.tracing import Tracing
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
    ids = [f"{renderer.answer_id}-{index}" for index in range(len(prompts))]
    rates: RateLimiter = request.app.state.rates
    rates.admit(_client(request), {i: _most_tokens(engine, prompt, params) for i, prompt in zip(ids, prompts)})
    tracing: Tracing | None = request.app.state.tracing
    if tracing is not None:
        tracing.follow(ids, request.headers.get("traceparent"))
    streams: list[RequestStream] = []
    try:
        for request_id, prompt in zip(ids, prompts, strict=True):
            stream = engine.submit(
                prompt,
                params,
                request_id=request_id,
                priority=body.priority or 0,
                client=_client(request),
                cache_salt=body.cache_salt or "",
            )
            streams.append(stream)
    except BaseException:
        _abort(streams)
        for request_id in ids[len(streams) :]:
            rates.settle(request_id)
        if tracing is not None:
            tracing.forget(ids[len(streams) :])
        raise
    renderer.begin(streams)
    timed = wants_timings(request)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        run = functools.partial(_stream, streams, renderer, include_usage, timed)
        return EventStream(run, request.app.state.streaming)
    outputs = await while_connected(request.receive, lambda: _collect(streams))
    answer = renderer.body(outputs)
    if not timed:
        return json_response(answer)
    timings = timings_body(output.timings for output in outputs)
    return json_response({**answer, "timings": timings}, headers=queue_header(timings))


def _client(request: Request) -> str:
    """The name of the client's key; without keys, where it comes from."""
    name: str = request.scope.get("state", {}).get("client", "")
    return name or (request.client.host if request.client is not None else "")


def _most_tokens(engine: ServingEngine, prompt: Sequence[int], params: SamplingParams) -> int:
    room = max(0, engine.max_model_len - len(prompt))
    return len(prompt) + params.n * (room if params.max_tokens is None else min(room, params.max_tokens))


def _check_room(engine: ServingEngine, wanted: int) -> None:
    """All prompts or none: what can never fit is the request's fault, what does not fit now may come again."""
    numbers = engine.statistics()
    if wanted > numbers.max_queue:
        raise InvalidRequestError(
            f"prompts times n is {wanted}; at most {numbers.max_queue} can wait at once", param="prompt"
        )
    if wanted > 1 and numbers.num_waiting + wanted > numbers.max_queue + numbers.num_free_seats:
        engine.note_rejection("queue_full")
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
    streams: Sequence[RequestStream], renderer: Renderer, include_usage: bool, timed: bool, sender: EventSender
) -> None:
    """Send chunks of all streams as they come, then the usage and the timings. While a client is slow its news pile up
    unread, joined to one delta for each choice; nothing but that waits for it."""
    for stream in streams:
        stream.listen(sender.bell, sender.rules.max_unread_tokens, sender.overrun)
    running = dict(enumerate(streams))
    ends: list[list[FinishReason]] = [[] for _ in streams]
    try:
        while running:
            chunks: list[msgspec.Raw] = []
            for index, stream in running.items():
                for delta in stream.take():
                    chunks += renderer.chunks(index, delta)
                    if delta.finish_reason is not None:
                        ends[index].append(delta.finish_reason)
            ended = [index for index, stream in running.items() if stream.finished]
            if chunks:
                await sender.events(chunks)
            for index in ended:
                if (error := running.pop(index).error) is not None:
                    raise error
                for reason in ends[index]:
                    _check_end(reason)
            if not (ended or chunks):
                await sender.news()
    finally:
        _abort(streams)
    if include_usage or timed:
        await sender.events([_last_chunk(streams, renderer, include_usage, timed)])


def _last_chunk(
    streams: Sequence[RequestStream], renderer: Renderer, include_usage: bool, timed: bool
) -> dict[str, object]:
    chunk = renderer.usage_chunk(stream.usage() for stream in streams)
    if not include_usage:
        del chunk["usage"]
    if timed:
        chunk["timings"] = timings_body(stream.timings() for stream in streams)
    return chunk


def _check_end(reason: FinishReason | None) -> None:
    """An answer that was cut off is never told as a finished one."""
    if reason is FinishReason.ABORT:
        raise UnavailableError("the server aborted the request", code="aborted")
    if reason is FinishReason.ERROR:
        raise ExecutionError("the request failed")


def _abort(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()
