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
    exports = [_exports(signal) for signal in _SIGNALS]
    try:
        from server.telemetry.otlp import otlp_telemetry
    except ImportError as error:
        message = f"--otel needs a package that is not installed ({error.name}): pip install 'twostep[otel]'."
        raise ConfigError(message) from error
    return otlp_telemetry(*exports)


def _exports(signal: str) -> bool:
    """Tells whether traces or metrics are exported. Raises ConfigError if they cannot be as they should."""
    name, exporter = _first(f"OTEL_{signal}_EXPORTER", default="otlp")
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise ConfigError(f"{name}: must be otlp or none, got {exporter!r}.")
    name, protocol = _first(*_otlp(signal, "PROTOCOL"), default="http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(f"{name}: must be http/protobuf, to the collector's port 4318 mostly, got {protocol!r}.")
    name, endpoint = _first(*_otlp(signal, "ENDPOINT"), default="http://localhost:4318")
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"{name}: write http://host:port, got {endpoint!r}.")
    return True


def _otlp(signal: str, what: str) -> tuple[str, str]:
    """Returns the variables of one signal and of all, of which the former goes before the latter."""
    return f"OTEL_EXPORTER_OTLP_{signal}_{what}", f"OTEL_EXPORTER_OTLP_{what}"


def _first(*names: str, default: str) -> tuple[str, str]:
    """Returns the first of these variables that has a value, and that; the default if none has."""
    return next(((name, value) for name in names if (value := _value(name))), (names[-1], default))


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()
