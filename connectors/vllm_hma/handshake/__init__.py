"""Contact between engines: side channel, handshakes, peers, messages and process liveness."""
