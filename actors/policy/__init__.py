"""Routing policy: decides which engines serve a request, by default from measured costs.

Does no I/O, and uses neither a clock nor Ray: callers pass the time.
"""
