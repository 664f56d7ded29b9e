"""The dashboard asks for metrics that exist, and shows every one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from microbatch.api.metrics import EngineMetrics
from tests.api.fake_engine import FakeEngine

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
#: Constants of a server, of no use as a curve.
NOT_SHOWN = {"microbatch:kv_cache_bytes", "microbatch:kv_cache_bytes_per_token"}


def test_the_dashboard_and_the_metrics_are_of_one_mind() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    asked = {
        re.sub("_(total|bucket|sum|count)$", "", name)
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"microbatch:\w+", target["expr"])
    }
    known = {family.name for family in EngineMetrics(FakeEngine()).registry.collect()}
    assert asked - known == set() and known - asked == NOT_SHOWN
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["refId"] for panel in panels for target in panel["targets"])
