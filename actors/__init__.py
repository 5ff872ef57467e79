"""Ray Serve deployments: the router, and the actors that host prefill and decode engines."""
