"""Tiers of the KV store: folders of object files, on disk or in host memory (tmpfs)."""
