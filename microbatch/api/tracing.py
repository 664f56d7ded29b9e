"""A span for each request, by OpenTelemetry where it is installed; nothing of it is loaded unless it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from microbatch.engine.stats import Observer, RequestRecord
from microbatch.errors import SetupError


class Tracing(Observer):
    """Makes a span when a request has ended, from the times that the engine knows: it costs the request nothing.

    ``follow`` names the parent that a client sent (W3C ``traceparent``). ``wall_clock`` is in nanoseconds.
    """

    def __init__(self, tracer: Any, wall_clock: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._wall_clock = wall_clock
        self._parents: dict[str, str] = {}

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Spans go to an OTLP collector over HTTP, in batches from a thread of their own. Raises ``SetupError`` where
        the packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SetupError(f"--otlp-endpoint needs the extra: pip install 'microbatch[otel]' ({error})") from None
        provider = TracerProvider(resource=Resource.create({"service.name": "microbatch"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        return cls(provider.get_tracer("microbatch"))

    def follow(self, request_ids: Sequence[str], traceparent: str | None) -> None:
        """These requests belong to the trace that ``traceparent`` names; a malformed one begins a new trace."""
        if traceparent is not None:
            self._parents.update((request_id, traceparent) for request_id in request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """These were refused."""
        for request_id in request_ids:
            self._parents.pop(request_id, None)

    def request_finished(self, record: RequestRecord) -> None:
        """The span of a request, with events where it was scheduled and where its first token came."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = self._wall_clock()
        begin = end - _nanoseconds(record.e2e_s or 0.0)
        carrier = {"traceparent": self._parents.pop(record.request_id, "")}
        parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            "request", parent, SpanKind.SERVER, attributes=_attributes(record), start_time=begin
        )
        for name, seconds in (("scheduled", record.queue_s), ("first token", record.ttft_s)):
            if seconds is not None:
                span.add_event(name, timestamp=begin + _nanoseconds(seconds))
        if record.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    """Names of the semantic conventions for generative AI where there is one."""
    return {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.finish_reasons": record.finish_reason,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "microbatch.cached_tokens": record.cached_tokens,
        "microbatch.client": record.client,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
