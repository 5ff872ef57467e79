"""The store in vLLM: a KV connector that stores KV after each step and loads stored prefixes."""
