"""Tests of the router, the engine actors and their parts."""
