"""Prometheus metrics and the recent numbers of `GET /stats`."""
