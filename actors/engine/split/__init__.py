"""A decode engine's call whose prompt a prefill engine computes."""
