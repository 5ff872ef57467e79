"""Endpoints for models, LoRA adapters, vLLM's version and tokenizer, and stored responses."""
