"""Hostile input, by a seed: the connector's messages and side channel, and the HTTP surface."""
