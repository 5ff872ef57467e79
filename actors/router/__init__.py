"""Handling of client requests: dispatch, retries, resumed streams."""
