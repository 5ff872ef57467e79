"""Engines of these tests are forked from a process that has imported vLLM."""

from testing import fork_server

fork_server.prepare()
