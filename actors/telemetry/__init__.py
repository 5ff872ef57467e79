"""Telemetry of routers and engines: metrics, latency breakdown, status page, access log."""
