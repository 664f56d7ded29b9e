"""``/metrics``: names, exact counters, whole histograms, gauges of the moment, no secrets."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from microbatch.api.app import create_app
from microbatch.api.histogram import CountedHistogram
from microbatch.api.metrics import EngineMetrics
from microbatch.engine.stats import EngineStatus, RequestRecord
from tests.api.fake_engine import FakeEngine
from tests.api.support import COMPLETIONS, body, client_of

pytestmark = pytest.mark.anyio

#: Every name that dashboards may rely on.
FAMILIES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "kv_fragmentation_ratio": "gauge",
    "kv_cache_bytes": "gauge",
    "kv_cache_bytes_per_token": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "prefix_tokens_saved": "counter",
    "swapped_blocks": "counter",
    "forked_tokens": "counter",
    "http_requests": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "admission_rejections": "counter",
    "slow_readers_dropped": "counter",
    "batch_closed": "counter",
    "batch_size": "histogram",
    "useful_token_ratio": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
}


async def page(engine: FakeEngine) -> str:
    async with client_of(create_app(engine)) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


async def samples(engine: FakeEngine, act: bool = True) -> dict[str, float]:
    """Every sample by name and labels, after one of each event."""
    app = create_app(engine)
    observer = engine.observers[0]
    if act:
        observer.batch_closed("window", 3)
        observer.step_done(20, 3, 0.75)
        observer.step_done(0, 2, 1.0)
        observer.token_gaps(0.04, 2)
        observer.request_finished(RequestRecord("a", "key-0", "stop", 20, 3, 4, 0.05, 0.2, 0.3, 0.05))
        observer.request_finished(RequestRecord("b", "key-0", "abort", 20, 0, 0, None, None, None, None))
        observer.request_rejected("queue_full")
        observer.preempted(2)
        observer.prefix_lookup(20, 16, 10)
        observer.blocks_swapped(3, 2)
        observer.prompt_forked(7)
    async with client_of(app) as client:
        text = (await client.get("/metrics")).text
    return {
        " ".join([s.name, *(f"{k}={v}" for k, v in s.labels.items())]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def test_names_and_types() -> None:
    families = {f.name: f.type for f in text_string_to_metric_families(await page(FakeEngine()))}
    assert families == {f"microbatch:{name}": kind for name, kind in FAMILIES.items()}


async def test_events_are_counted_exactly() -> None:
    got = await samples(FakeEngine())
    for name, value in {
        "batch_closed_total reason=window": 1,
        "batch_size_sum": 3,
        "prompt_tokens_total": 20,
        "generation_tokens_total": 5,
        "useful_token_ratio_count": 2,
        "useful_token_ratio_sum": 1.75,
        "inter_token_latency_seconds_sum": 0.08,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_bucket le=0.03": 0,
        "inter_token_latency_seconds_bucket le=0.05": 2,
        "request_success_total finished_reason=stop": 1,
        "request_success_total finished_reason=abort": 1,
        "request_queue_time_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.2,
        "e2e_request_latency_seconds_sum": 0.3,
        "request_time_per_output_token_seconds_sum": 0.05,
        "admission_rejections_total reason=queue_full": 1,
        "num_preemptions_total": 2,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 16,
        "prefix_tokens_saved_total prefix=declared": 10,
        "prefix_tokens_saved_total prefix=other": 6,
        "swapped_blocks_total direction=out": 3,
        "swapped_blocks_total direction=in": 2,
        "forked_tokens_total": 7,
    }.items():
        assert got[f"microbatch:{name}"] == value, name


async def test_series_exist_before_their_first_event() -> None:
    got = await samples(FakeEngine(), act=False)
    assert got["microbatch:request_success_total finished_reason=error"] == 0
    assert got["microbatch:batch_closed_total reason=drain"] == 0
    assert got["microbatch:admission_rejections_total reason=dead"] == 0


async def test_gauges_show_the_moment() -> None:
    got = await samples(FakeEngine())
    assert got["microbatch:num_requests_running"] == 0
    assert got["microbatch:kv_cache_usage_perc"] == 4 / 64
    assert (got["microbatch:kv_cache_bytes"], got["microbatch:kv_cache_bytes_per_token"]) == (64 * 16 * 100, 100)


async def test_no_gauges_while_the_engine_starts() -> None:
    text = await page(FakeEngine(status=EngineStatus("starting")))
    assert "microbatch:num_requests_running" not in text and "microbatch:prompt_tokens_total 0.0" in text


async def test_histograms_are_whole() -> None:
    got = await samples(FakeEngine())
    for name, kind in FAMILIES.items():
        if kind == "histogram":
            full = f"microbatch:{name}"
            assert got[f"{full}_bucket le=+Inf"] == got[f"{full}_count"]


async def test_counted_observations_are_those_of_the_library_one_by_one() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    one_by_one = Histogram("a:b", "What.", buckets=(0.005, 0.01, 1, 10), registry=theirs)
    counted = CountedHistogram("a:b", "What.", (0.005, 0.01, 1, 10))
    ours.register(counted)
    for value, count in ((0.005, 1), (0.0051, 2), (1, 3), (10, 1), (99, 4), (0, 1)):
        counted.observe(value, count)
        for _ in range(count):
            one_by_one.observe(value)
    text = generate_latest(theirs).decode()
    assert generate_latest(ours).decode() == text[: text.index("# HELP a:b_created")]


async def test_two_engines_count_apart() -> None:
    one, two = EngineMetrics(FakeEngine()), EngineMetrics(FakeEngine())
    one.step_done(1, 1, 1.0)
    assert one.registry.get_sample_value("microbatch:generation_tokens_total") == 1
    assert two.registry.get_sample_value("microbatch:generation_tokens_total") == 0


async def test_nothing_a_client_sent_is_on_the_page() -> None:
    app = create_app(FakeEngine(), api_keys=["sk-secret"])
    async with client_of(app, headers={"Authorization": "Bearer sk-secret"}) as client:
        await client.post(COMPLETIONS, json=body(COMPLETIONS, model='x"} 1\nevil_metric 5'))
        await client.post(COMPLETIONS, json=body(COMPLETIONS, prompt="secretprompt", user="secretuser"))
        text = (await client.get("/metrics")).text
    assert not any(word in text for word in ("evil_metric", "secretprompt", "secretuser", "sk-secret"))
