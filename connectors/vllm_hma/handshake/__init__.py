"""First contact between engines: agent metadata, peers and their connections, liveness of their processes."""
