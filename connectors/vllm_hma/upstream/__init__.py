"""Workarounds that depend on private parts of vLLM, one file per part."""
