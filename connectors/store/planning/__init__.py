"""Geometry of the KV store: stored objects, usable prefixes, and the bytes to copy. Pure."""
