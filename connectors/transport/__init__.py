"""Moving bytes and messages between agents: NIXL, and an in-memory transport for tests and simulations."""
