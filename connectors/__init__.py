"""The KV connector: moves the KV cache of hybrid models between vLLM engines of unequal shape."""
