"""The connections between routers and engines, apart from Ray Serve."""
