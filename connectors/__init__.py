"""The KV connector of vLLM engines: transfers between engines of unequal shape, and a KV store."""
