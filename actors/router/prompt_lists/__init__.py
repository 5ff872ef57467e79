"""Completions with a list of prompts: one request per prompt, and one answer."""
