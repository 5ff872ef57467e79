"""Move bytes and messages between agents, over NIXL or in memory, and compute digests of bytes."""
