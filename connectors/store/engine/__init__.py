"""The store inside vLLM: a KV connector that stores what an engine computes and loads what was stored."""
