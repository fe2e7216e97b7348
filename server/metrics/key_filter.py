"""What a client may see of the metrics by API key: their names, and how much others use, are not for everybody."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class KeyFilter(Collector):
    """The metrics of another collector, but of those by API key the series of one key alone."""

    def __init__(self, collector: Collector, key: str) -> None:
        """`key` is the key's name; empty for no series by key at all."""
        self._collector = collector
        self._key = key

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [each for each in metric.samples if each.labels.get("key", self._key) == self._key]
            yield metric
