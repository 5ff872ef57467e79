"""Replays loads in a simulated fleet and compares where policies send requests: `python -m benchmarks.routing`."""
