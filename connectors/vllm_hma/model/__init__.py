"""The loaded model: layout of its caches, and the identity that peers compare."""
