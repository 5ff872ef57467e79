"""The KV store: keeps computed KV on disk and in host memory for later requests."""
