"""Moves bytes and messages between agents: over NIXL, or in memory for tests and simulations."""
