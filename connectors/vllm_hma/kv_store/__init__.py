"""The KV store in vLLM: stores KV after a step, and loads stored prefixes before one."""
