"""The KV store: keeps computed KV in files, on disk or in host memory, for later requests."""
