"""Workarounds for the processes of a vLLM engine."""
