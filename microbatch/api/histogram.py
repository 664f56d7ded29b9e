"""A histogram that takes many equal observations at once: a step gives a token to each of its sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CountedHistogram(Collector):
    """Like ``prometheus_client.Histogram``, whose ``observe`` takes one value under a lock. Not thread-safe."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``value`` was seen ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """The histogram as Prometheus has it: each bucket counts what is at or below its bound."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
