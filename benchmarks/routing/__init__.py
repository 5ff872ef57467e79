"""Replays loads in a simulated fleet and compares routing policies: `python -m
benchmarks.routing`.
"""
