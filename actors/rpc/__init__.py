"""RPC between routers and engines over TCP, independent of Ray Serve."""
