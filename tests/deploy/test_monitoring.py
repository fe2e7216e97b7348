"""The dashboard and the alerts ask only for what the server exposes, and Prometheus understands them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.core.timings import TokenCounts
from server.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/twostep.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = DASHBOARD["templating"]["list"]

panels = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[str]:
    yield from (target["expr"] for panel in PANELS for target in panel["targets"])
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])
    yield from (variable["definition"] for variable in VARIABLES if variable["type"] == "query")
    yield from (rule["expr"] for rule in alert_rules())


def exposed() -> dict[str, set[str]]:
    """Returns every sample name of the server's /metrics with its labels."""
    metrics = Metrics("model", with_vllm_names=False)
    metrics.on_rejection("slow_down")
    metrics.on_broken_stream("internal_error")
    metrics.on_promise("ttft", "kept")
    metrics.on_key_request("alice", TokenCounts(1, 0, 1), "slow_down")
    metrics.on_http_request("/v1/completions", "POST", 200, 0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def labels_in(query: str) -> set[str]:
    """Returns the labels that a query selects or groups by, without the ones that Prometheus adds itself."""
    grouped = {name.strip() for names in re.findall(r"\bby \(([^)]*)\)", query) for name in names.split(",")}
    return (grouped | set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query))) - {"instance", "job"}


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """Returns the grid cells that a panel covers: columns [x, x + w), lines [y, y + h)."""
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    return {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}


def run_promtool(*arguments: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    result = subprocess.run([promtool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_its_configuration() -> None:
    run_promtool("check", "config", "deploy/prometheus/prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    run_promtool("test", "rules", "tests/deploy/alerts_test.yml")


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_queries_use_what_the_server_exposes(query: str) -> None:
    known = exposed()
    names = set(re.findall(r"\btwostep_\w+", query))
    assert names - known.keys() == set()
    assert labels_in(query) <= set().union(*(known[name] for name in names))


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    every = DASHBOARD["panels"]
    assert all(cells(a).isdisjoint(cells(b)) for a, b in combinations(every, 2))
    assert all(x < 24 for panel in every for x, _ in cells(panel))


def test_panel_ids_are_unique() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@panels
def test_every_query_is_of_the_chosen_source_and_instances(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
        metrics = re.findall(r"\b(?:twostep|http)_\w+", target["expr"])
        assert target["expr"].count('{instance=~"$instance"') == len(metrics) > 0


@panels
def test_counters_and_histograms_are_read_as_rates(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for suffix_and_rest in re.findall(r"_(?:total|bucket|sum|count)\{[^}]*\}(.{0,18})", target["expr"]):
            assert suffix_and_rest == "[$__rate_interval]"


def test_variables_and_dashboard_have_stable_names() -> None:
    assert [variable["name"] for variable in VARIABLES] == ["datasource", "instance"]
    assert DASHBOARD["uid"] == "twostep"


def test_every_alert_has_a_severity_and_a_sentence() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_alerts_count_requests_that_ask_for_work_and_no_probes() -> None:
    rules = " ".join(rule["expr"] for rule in alert_rules())
    assert rules.count('twostep_http_requests_total{method="POST"') == rules.count("twostep_http_requests_total") > 0
