"""Serves one request: both legs, retries, the resumed stream."""
