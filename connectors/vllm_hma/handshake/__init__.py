"""First contact between engines: agent metadata, peers and their connections, process liveness."""
