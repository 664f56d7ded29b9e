"""A span for each request: where it stands in the client's trace, its times, its end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from microbatch.api.app import create_app
from microbatch.api.tracing import Tracing
from microbatch.core.request import FinishReason
from microbatch.engine.outputs import Timings, Usage
from microbatch.engine.stats import RequestRecord
from microbatch.errors import InvalidRequestError, SetupError
from tests.api.fake_engine import FakeEngine
from tests.api.support import BOTH, COMPLETIONS, body, client_of, error_of

trace = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
simple = pytest.importorskip("opentelemetry.sdk.trace.export")

pytestmark = pytest.mark.anyio
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOW = 1_800_000_000_000_000_000


def traced() -> tuple[Tracing, Any]:
    exporter = export.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(simple.SimpleSpanProcessor(exporter))
    return Tracing(provider.get_tracer("test"), lambda: NOW), exporter


def finish(engine: FakeEngine, reason: FinishReason = FinishReason.STOP) -> None:
    for request in engine.requests:
        record = RequestRecord.make(request, reason, Usage(2, 5, 1), Timings(0.5, 1.0, 3.0))
        for observer in engine.observers:
            observer.request_finished(record)


@pytest.mark.parametrize("path", BOTH)
async def test_a_request_is_a_span_of_the_clients_trace(path: str) -> None:
    tracing, exporter = traced()
    engine = FakeEngine()
    async with client_of(create_app(engine, tracing=tracing)) as client:
        await client.post(path, json=body(path), headers={"traceparent": PARENT})
    finish(engine)
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" in PARENT and f"{span.parent.span_id:016x}" in PARENT
    assert (span.start_time, span.end_time) == (NOW - 3 * 10**9, NOW)
    times = {event.name: event.timestamp - span.start_time for event in span.events}
    assert times == {"scheduled": 5 * 10**8, "first token": 10**9}
    assert span.attributes["gen_ai.usage.output_tokens"] == 5 and span.status.is_ok is not False
    assert not tracing._parents


@pytest.mark.parametrize("header", [{}, {"traceparent": "nonsense"}, {"traceparent": "00-" + "0" * 32 + "-1-01"}])
async def test_without_a_good_parent_a_trace_begins(header: dict[str, str]) -> None:
    tracing, exporter = traced()
    engine = FakeEngine()
    async with client_of(create_app(engine, tracing=tracing)) as client:
        await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt=["a", "b"]), headers=header)
    finish(engine, FinishReason.ERROR)
    spans = exporter.get_finished_spans()
    assert len(spans) == 2 and all(span.parent is None and not span.status.is_ok for span in spans)


async def test_a_refused_request_leaves_nothing_behind() -> None:
    tracing, exporter = traced()
    engine = FakeEngine()
    engine.refusals.append(InvalidRequestError("no"))
    async with client_of(create_app(engine, tracing=tracing)) as client:
        error_of(await client.post(COMPLETIONS, json=body(COMPLETIONS), headers={"traceparent": PARENT}))
    assert not tracing._parents and not exporter.get_finished_spans()


async def test_without_the_packages_the_flag_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match=r"microbatch\[otel\]"):
        Tracing.to("http://127.0.0.1:1/v1/traces")
