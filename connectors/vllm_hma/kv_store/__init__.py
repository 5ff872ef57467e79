"""The KV store in vLLM: stores KV after each step and loads stored prefixes."""
