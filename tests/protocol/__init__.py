"""Tests of the messages and the state machines."""
