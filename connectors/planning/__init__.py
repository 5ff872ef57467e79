"""Cache geometry: the byte ranges to copy between two KV caches. Imports numpy and stdlib only."""
