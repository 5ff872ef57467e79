"""Decides whether decode serves a request alone or a pair of engines does, from measured costs. No
I/O, clock or Ray."""
