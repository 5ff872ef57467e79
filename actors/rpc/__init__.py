"""The connections between routers and engines, independent of Ray Serve."""
