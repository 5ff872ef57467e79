"""Serving of one client request: dispatch of both legs, retries, resumed streams."""
