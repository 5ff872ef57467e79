"""Handling of client requests: dispatch of both legs, retries, resumed streams."""
