"""Connector in vLLM's scheduler: starts transfers and holds quarantined blocks."""
