"""The files that build and start the containers fit together: versions, paths, ports."""

import json
import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
GRAFANA = ROOT / "deploy" / "grafana"

SERVICES = sorted(COMPOSE["services"])
MOUNTS: list[str] = [mount for service in COMPOSE["services"].values() for mount in service["volumes"]]


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def normalized(requirement: str) -> str:
    """Returns the name in a line like `Jinja2[x]>=3`, as package indexes compare names."""
    return re.split(r"[\[=<>~!; ]", requirement)[0].lower().replace("_", "-")


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normalized(line) for line in lines if re.match(r"[\w.-]+==[\w.+-]+$", line)}
    wanted = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    assert {normalized(requirement) for requirement in wanted} - pinned == set()


def test_one_version_everywhere() -> None:
    assert COMPOSE["services"]["server"]["image"] == f"twostep:{PROJECT['version']}"
    assert f'image.version="{PROJECT["version"]}"' in DOCKERFILE


def test_the_image_gets_every_file_that_the_package_is_built_from() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {pattern.rstrip("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert let_in >= {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"], *packages}


def test_a_gpu_changes_the_server_alone_and_in_what_is_there() -> None:
    server, base = GPU["services"]["server"], COMPOSE["services"]["server"]
    assert GPU["services"].keys() == {"server"}
    assert server.keys() - base.keys() == {"deploy"} and server["environment"].keys() - base["environment"].keys() == {
        "TWOSTEP_DEVICE"
    }
    assert server["image"] == f"{base['image']}-cuda"  # beside that of the CPU, not in its place
    assert server["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_the_settings_on_a_gpu_are_ones_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        COMPOSE["services"]["server"]["environment"] | GPU["services"]["server"]["environment"]
    ).items():
        monkeypatch.setenv(name, value or "")
    config = Settings().engine_config()
    assert config.device == "cuda" and config.kv_store is None


def test_the_image_of_a_gpu_has_torch_with_cuda_and_a_compiler() -> None:
    assert GPU["services"]["server"]["build"]["args"]["PIP_EXTRA_INDEX_URL"] == ""
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    step = next(step for step in final.split("\nRUN ") if "site-packages/triton" in step)
    assert re.search(r"install --yes --no-install-recommends gcc libc6-dev\b", step)
    assert final.index(step) > final.index("COPY --from=builder /opt/venv") and final.index(step) < final.index("USER ")


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_open_to_this_machine_only(service: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][service]["ports"])


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned(service: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+$", COMPOSE["services"][service]["image"])


@pytest.mark.parametrize("mount", [mount for mount in MOUNTS if mount.startswith("./deploy")])
def test_what_is_mounted_exists_and_is_read_only(mount: str) -> None:
    source, _, mode = mount.split(":")
    assert (ROOT / source).is_dir()
    assert mode == "ro"


def test_named_volumes_are_declared() -> None:
    assert {mount.split(":")[0] for mount in MOUNTS if not mount.startswith(".")} == COMPOSE["volumes"].keys()


def test_prometheus_scrapes_the_port_that_the_server_opens() -> None:
    jobs = {job["job_name"]: job for job in load_yaml(ROOT / "deploy/prometheus/prometheus.yml")["scrape_configs"]}
    exposed = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)
    assert jobs["twostep"]["static_configs"][0]["targets"] == [f"server:{exposed[0]}"]


def test_grafana_finds_its_dashboard() -> None:
    folder = load_yaml(GRAFANA / "provisioning/dashboards/twostep.yml")["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in COMPOSE["services"]["grafana"]["volumes"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(folder)
    assert (GRAFANA / "dashboards" / Path(home).name).exists()


def test_grafana_asks_the_prometheus_of_the_compose_file() -> None:
    source = load_yaml(GRAFANA / "provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    dashboard = json.loads((GRAFANA / "dashboards/twostep.json").read_text(encoding="utf-8"))
    assert dashboard["templating"]["list"][0]["query"] == source["type"]
