"""Prometheus metrics, and the statistics of recent requests and steps that `GET /stats` shows."""
