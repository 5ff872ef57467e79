"""The OpenAI-compatible HTTP interface of a router."""
