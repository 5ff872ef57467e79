"""Cache geometry: the byte ranges to copy between two KV caches. Imports neither vLLM nor NIXL."""
