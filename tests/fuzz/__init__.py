"""Hostile input from a seed: the connector's messages and side channel, and the HTTP interface."""
