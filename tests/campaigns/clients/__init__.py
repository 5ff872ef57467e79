"""Programs that users already have, against a service and beside one vLLM server."""
