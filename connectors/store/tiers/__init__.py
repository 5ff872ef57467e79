"""Tiers of the KV store (folders of object files, on disk or on tmpfs), and staging memory."""
