"""Ray Serve deployments: the router and the actors that host the prefill and decode engines."""
