"""Reading /metrics in tests."""

from collections.abc import Callable
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live_server import LiveServer


def parse(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def advance(server: LiveServer, act: Callable[[], Any]) -> Callable[..., float]:
    """Runs `act` and returns a function that tells by how much a series advanced meanwhile."""

    def read() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        server.wait_until_idle()
        families = parse(server.client.get("/metrics").text).values()
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    before = read()
    act()
    after = read()

    def advanced(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after[key] - before.get(key, 0.0)

    return advanced
