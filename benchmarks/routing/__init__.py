"""Replay loads in a simulated fleet, compare routing policies: `python -m benchmarks.routing`."""
