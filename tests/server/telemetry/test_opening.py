"""Whether there is telemetry, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from server.settings.settings import Settings
from server.telemetry.opening import open_telemetry
from server.telemetry.telemetry import NullTelemetry

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = """
import sys
from server.app import create_app
from server.settings.settings import Settings
from tests.server.live_server import FakeBackend
settings = Settings()
create_app(settings, FakeBackend().opener(settings))
parts = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
sys.exit(any(name.startswith(parts) for name in sys.modules))
"""


def test_without_the_flag_the_sdk_is_not_imported() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, timeout=60).returncode == 0
    assert not Settings().otel and isinstance(open_telemetry(False), NullTelemetry)


@pytest.mark.parametrize("value", ["true", "True "])
def test_the_environment_may_disable_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", value)
    assert isinstance(open_telemetry(True), NullTelemetry)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http.trace_exporter"])
def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in list(sys.modules):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "server.telemetry.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"--otel needs a package .*: pip install 'twostep\[otel\]'\.$"):
        open_telemetry(True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "ftp://collector"),
    ],
)
def test_ways_of_exporting_that_there_are_not_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^{variable}: .*{value}"):
        open_telemetry(True)
    assert isinstance(open_telemetry(False), NullTelemetry)
