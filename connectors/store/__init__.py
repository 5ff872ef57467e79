"""The KV store: what engines computed before, on disk and in host memory, loaded right or not at all."""
