"""Telemetry of routers and engines: metrics, latency breakdown, recent requests, access log."""
