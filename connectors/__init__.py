"""The KV connector: transfers KV caches of hybrid models between vLLM engines of unequal shape."""
