"""Parts that only engines on vLLM's CPU build load; others never import this package."""
