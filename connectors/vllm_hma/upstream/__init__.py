"""Workarounds for vLLM, most of which depend on private parts of it; one file per part."""
