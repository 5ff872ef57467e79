"""Scheduler side of the connector: starts transfers and holds blocks in quarantine."""
