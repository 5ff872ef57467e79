"""Replay loads in a simulated fleet under routing policies and an oracle."""
