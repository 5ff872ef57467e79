"""This engine's model as vLLM loaded it: the layout of its caches, and the identity that peers compare."""
