"""Metrics, the latency breakdown, and recent requests."""
