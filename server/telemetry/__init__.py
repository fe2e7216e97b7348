"""Traces and metrics of requests, exported by OpenTelemetry with `--otel`. Without it, its SDK is not imported."""
