"""Scheduler side of the connector: orders transfers and keeps blocks of requests allocated."""
