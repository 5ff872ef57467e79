"""Cost of a router: equal instant engines behind Tandem's, vLLM's, a plain proxy, and no router."""
