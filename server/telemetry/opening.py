"""Sets up telemetry as the OTEL_* variables say: read here and, mostly, by OpenTelemetry's SDK itself."""

import os
import re

from engine.core.errors import ConfigError
from server.telemetry.telemetry import NullTelemetry, Telemetry

_ENDPOINT = re.compile(r"https?://[^/\s]\S*")
_SIGNALS = ("TRACES", "METRICS")


def open_telemetry(is_on: bool) -> Telemetry:
    """Returns the telemetry of one app. Raises ConfigError if the extra is not installed, or for a variable that names
    a way of exporting which there is not."""
    if not is_on or _value("OTEL_SDK_DISABLED").lower() == "true":
        return NullTelemetry()
    for signal in _SIGNALS:
        _check_protocol(signal)
    try:
        from server.telemetry.otlp import otlp_telemetry
    except ImportError as error:
        message = f"--otel needs a package that is not installed ({error.name}): pip install 'twostep[otel]'."
        raise ConfigError(message) from error
    return otlp_telemetry(*(_exports(signal) for signal in _SIGNALS))


def _exports(signal: str) -> bool:
    """Tells whether traces or metrics are exported. Raises ConfigError."""
    name = f"OTEL_{signal}_EXPORTER"
    if (value := _value(name) or "otlp") not in ("otlp", "none"):
        raise ConfigError(f"{name}: must be otlp or none, got {value!r}.")
    return value == "otlp"


def _check_protocol(signal: str) -> None:
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (value := _value(name) or "http/protobuf") != "http/protobuf":
            raise ConfigError(f"{name}: must be http/protobuf, to the collector's port 4318 mostly, got {value!r}.")
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if (value := _value(name)) and not _ENDPOINT.fullmatch(value):
            raise ConfigError(f"{name}: write http://host:port, got {value!r}.")


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()
