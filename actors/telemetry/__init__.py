"""Metrics, latency breakdown, recent requests."""
