"""Endpoints forwarded to engines: model lists, LoRA adapters, version, stored responses."""
