"""Connector in vLLM's workers: runs the state machines on one rank's memory."""
