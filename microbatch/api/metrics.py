"""``GET /metrics``: what the engine tells, as Prometheus text. Names mirror vLLM's under ``microbatch:``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.histogram import CountedHistogram
from microbatch.api.ports import ServingEngine
from microbatch.core.request import FinishReason
from microbatch.engine.stats import Observer, RequestRecord
from microbatch.errors import MicrobatchError

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
TOKEN_SECONDS: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATIOS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
CLOSE_REASONS: Final = ("size", "window", "idle", "memory", "drain")
REJECTIONS: Final = ("queue_full", "context_length", "draining", "dead", "rate_limit")
DROPS: Final = ("timeout", "unread")


class EngineMetrics(Observer):
    """Counters and histograms of one engine in a registry of its own; gauges are read when the page is asked for."""

    def __init__(self, engine: ServingEngine) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Gauges(engine))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated, end tokens included.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens whose K/V was found in the prefix cache.")
        self._saved = self._counter(
            "prefix_tokens_saved", "Prompt tokens that were not computed: declared prefixes, all others.", "prefix"
        )
        self._forked = self._counter("forked_tokens", "Prompt tokens that choices took over from the first one.")
        self._swapped = self._counter("swapped_blocks", "K/V blocks copied to host memory and back.", "direction")
        self._http = self._counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self._preemptions = self._counter(
            "num_preemptions", "Sequences that lost their K/V blocks and were recomputed."
        )
        self._finished = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests refused at the door, by reason.", "reason")
        self._dropped = self._counter("slow_readers_dropped", "Streams whose client did not read, by reason.", "reason")
        self._closed = self._counter("batch_closed", "Batches closed, by reason.", "reason")
        self._batch_size = self._histogram("batch_size", "Sequences in a batch when it was closed.", SIZES)
        self._useful = self._histogram("useful_token_ratio", "Share of a step's tokens that is not padding.", RATIOS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._itl = CountedHistogram(
            "microbatch:inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_SECONDS
        )
        self.registry.register(self._itl)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "(e2e - ttft) / (tokens - 1) of a request.", TOKEN_SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduling.", SECONDS)
        self._show_zeros()

    def batch_closed(self, reason: str, size: int) -> None:
        """Count a batch and its size."""
        self._closed.labels(reason).inc()
        self._batch_size.observe(size)

    def step_done(self, prompt_tokens: int, generation_tokens: int, useful_token_ratio: float) -> None:
        """Count the tokens of a step."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)
        self._useful.observe(useful_token_ratio)

    def token_gaps(self, seconds: float, count: int) -> None:
        """Note the time between two tokens of each of ``count`` sequences."""
        self._itl.observe(seconds, count)

    def request_finished(self, record: RequestRecord) -> None:
        """Count a request and note its times."""
        self._finished.labels(record.finish_reason).inc()
        for histogram, seconds in (
            (self._queue, record.queue_s),
            (self._ttft, record.ttft_s),
            (self._e2e, record.e2e_s),
            (self._tpot, record.tpot_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def request_rejected(self, reason: str) -> None:
        """Count a refusal."""
        self._rejected.labels(reason).inc()

    def reader_dropped(self, reason: str) -> None:
        """Count a stream that was given up because its client did not read."""
        self._dropped.labels(reason).inc()

    def preempted(self, count: int) -> None:
        """Count preempted sequences."""
        self._preemptions.inc(count)

    def prefix_lookup(self, query_tokens: int, hit_tokens: int, pinned_tokens: int) -> None:
        """Count tokens looked up and found."""
        self._queries.inc(query_tokens)
        self._hits.inc(hit_tokens)
        self._saved.labels("declared").inc(pinned_tokens)
        self._saved.labels("other").inc(hit_tokens - pinned_tokens)

    def blocks_swapped(self, out: int, back: int) -> None:
        """Count blocks."""
        self._swapped.labels("out").inc(out)
        self._swapped.labels("in").inc(back)

    def prompt_forked(self, tokens: int) -> None:
        """Count tokens."""
        self._forked.inc(tokens)

    def http_request(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(route, str(status)).inc()

    def routes(self) -> list[Route]:
        """The metrics page."""
        return [Route("/metrics", self.page)]

    async def page(self, request: Request) -> Response:
        """All metrics in the text format."""
        return Response(generate_latest(_WithoutCreated(self.registry)), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"microbatch:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"microbatch:{name}", text, buckets=buckets, registry=self.registry)

    def _show_zeros(self) -> None:
        """A series that first appears with its first event hides that event from ``rate()``."""
        for reason in FinishReason:
            self._finished.labels(reason.value)
        for name in CLOSE_REASONS:
            self._closed.labels(name)
        for name in DROPS:
            self._dropped.labels(name)
        for name in REJECTIONS:
            self._rejected.labels(name)
        for name in ("declared", "other"):
            self._saved.labels(name)
        for name in ("out", "in"):
            self._swapped.labels(name)


class _Gauges(Collector):
    """The engine's statistics at the moment of the scrape; nothing while it has none."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        try:
            now = self._engine.statistics()
        except MicrobatchError:
            return
        yield _gauge("num_requests_running", "Sequences in the running batch.", now.num_running)
        yield _gauge("num_requests_waiting", "Sequences that wait.", now.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the K/V blocks in use, 0 to 1.", now.kv_cache_usage)
        yield _gauge(
            "kv_fragmentation_ratio", "Share of slots in used K/V blocks without a token, 0 to 1.", now.kv_fragmentation
        )
        yield _gauge("kv_cache_bytes", "Bytes of all K/V blocks.", now.kv_cache_bytes)
        yield _gauge("kv_cache_bytes_per_token", "Bytes of one token's K/V.", now.kv_bytes_per_token)

    def describe(self) -> Iterable[Metric]:
        return []


class _WithoutCreated(Collector):
    """Leaves out the ``_created`` series, which the text format can only show as more gauges."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"microbatch:{name}", text, value=value)
