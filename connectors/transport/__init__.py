"""Moves bytes and messages between agents, over NIXL or in memory; computes digests of bytes."""
