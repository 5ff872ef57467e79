"""The prefill and decode deployments around one vLLM engine each."""
