"""The Prefill and Decode deployments, each around one vLLM engine."""
