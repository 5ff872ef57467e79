"""The embedded demo model: a small Gemma-3 checkpoint that answers key-value recall questions."""
