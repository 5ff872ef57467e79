"""Replay loads in a simulated fleet and compare routing policies: `python -m
benchmarks.routing`.
"""
