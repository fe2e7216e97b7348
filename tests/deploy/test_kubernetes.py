"""The manifests and the chart for Kubernetes: valid, equal, and fitting to the server, its image and its metrics."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from server.metrics.metrics import Metrics
from server.settings.settings import Settings
from tests.server.fake_engine import INFO

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "kubernetes" / "chart"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "twostep.yaml"
OTHER_VALUES: list[dict[str, Any]] = [
    {"autoscaling": {"enabled": False}, "podMonitor": {"enabled": False}, "inferencePool": {"enabled": True}},
    {"model": "a/b", "arguments": ["--quantization", "int8"], "cache": {"storageClassName": "fast", "kvStore": False}},
    {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "a", "operator": "Exists"}], "image": {"tag": "1.2"}},
]
CUSTOM = {"PodMonitor", "InferencePool"}  # kinds that Kubernetes itself does not know

Manifest = dict[str, Any]


def plain() -> dict[str, Manifest]:
    """Returns the manifests by kind."""
    documents = yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8"))
    return {each["kind"]: each for each in documents}


def rendered(values: dict[str, Any] | None = None) -> dict[str, Manifest]:
    """Returns what the chart makes of values, by kind."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk renders charts: pip install -e '.[kubernetes]'")
    files = helm.Chart.load(CHART).render(values, name="twostep")
    documents = [each for text in files.values() for each in yaml.safe_load_all(text)]
    return {each["kind"]: each for each in documents if each}


def check(manifest: Manifest) -> None:
    """Raises if Kubernetes would refuse the manifest; fields that it does not know are an error."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[kubernetes]' brings the schemas")
    if manifest["kind"] not in CUSTOM:
        validator.validate(manifest, "1.33", strict=True)


def container(manifests: dict[str, Manifest]) -> dict[str, Any]:
    return dict(manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0])


def test_all_that_a_service_needs_is_there() -> None:
    assert plain().keys() == {
        "Deployment",
        "HorizontalPodAutoscaler",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "PodMonitor",
        "Service",
    }


@pytest.mark.parametrize("kind", plain())
def test_kubernetes_understands_the_manifests(kind: str) -> None:
    check(plain()[kind])


def test_the_validator_refuses_what_is_misspelt() -> None:
    manifest = plain()["Service"]
    manifest["spec"]["selectr"] = {}
    with pytest.raises(Exception, match="selectr"):
        check(manifest)


def test_the_manifests_are_those_of_the_chart() -> None:
    assert rendered() == plain()


@pytest.mark.parametrize("values", OTHER_VALUES)
def test_kubernetes_understands_the_chart_with_other_values(values: dict[str, Any]) -> None:
    for manifest in rendered(values).values():
        check(manifest)


def test_the_chart_has_no_findings() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk checks charts: pip install -e '.[kubernetes]'")
    report = helm.lint(CHART, strict=True, kube_version="v1.33.0")
    assert report["errors"] == [] and [each for each in report["messages"] if each["severity"] > 1] == []


def test_values_reach_their_places() -> None:
    assert "--quantization" in container(rendered(OTHER_VALUES[1]))["args"]
    assert container(rendered(OTHER_VALUES[1]))["args"][0] == "a/b"
    assert container(rendered(OTHER_VALUES[2]))["image"] == "twostep:1.2"
    assert rendered(OTHER_VALUES[0])["Deployment"]["spec"]["replicas"] == 2
    assert rendered(OTHER_VALUES[0])["InferencePool"]["spec"]["targetPorts"] == [{"number": 8000}]


def test_all_select_the_same_pods() -> None:
    manifests = plain()
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [manifests[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    selectors += [manifests["Service"]["spec"]["selector"], manifests["PodMonitor"]["spec"]["selector"]["matchLabels"]]
    assert all(selector == labels for selector in selectors)
    names = {each["metadata"]["name"] for each in manifests.values()}
    assert names == {"twostep"}
    assert manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "twostep"


def test_ports_and_volumes_that_are_named_exist() -> None:
    manifests = plain()
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    assert ports == {"http": 8000}
    assert "EXPOSE 8000" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    volumes = {each["name"] for each in manifests["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container(manifests)["volumeMounts"]} == volumes
    assert all(each["port"] == "http" for each in manifests["PodMonitor"]["spec"]["podMetricsEndpoints"])


def test_pods_may_do_nothing_that_they_need_not() -> None:
    manifests = plain()
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    user = re.findall(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user == [str(pod["securityContext"]["runAsUser"])] and pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container(manifests)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_flags_exist_and_streams_have_time_to_end() -> None:
    manifests = plain()
    flags = dict(each.removeprefix("--").split("=") for each in container(manifests)["args"])
    names = {name.replace("_", "-") for name in Settings.model_fields}
    assert flags.keys() <= names
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    before = container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = TypeAdapter(int).validate_python(pod["terminationGracePeriodSeconds"])
    assert grace > float(flags["shutdown-timeout"]) + before


def test_the_autoscaler_asks_for_a_metric_that_is_exposed() -> None:
    metrics = plain()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert [each["pods"]["metric"]["name"] for each in metrics] == ["twostep_requests_waiting"]
    assert "twostep_requests_waiting " in Metrics("model", with_vllm_names=False).render().decode()


def test_endpoint_pickers_find_the_metrics_that_they_read() -> None:
    """Those of the Gateway API inference extension, by the names that its picker and llm-d's have as defaults. Without
    adapters there is no `vllm:lora_requests_info`."""
    metrics = Metrics("model", with_vllm_names=True)
    metrics.on_engine_info(INFO)
    families = {each.name: each for each in text_string_to_metric_families(metrics.render().decode())}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert families[name].type == "gauge" and len(families[name].samples) == 1
    (info,) = families["vllm:cache_config_info"].samples
    assert int(info.labels["block_size"]) == INFO.block_size and int(info.labels["num_gpu_blocks"]) == INFO.num_blocks
