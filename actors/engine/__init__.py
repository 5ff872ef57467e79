"""The Prefill and Decode deployments; each of their replicas runs one vLLM engine."""
