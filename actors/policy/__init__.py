"""Routing policy: decides from measured costs which engines serve a request.

Does no I/O, and uses neither a clock nor Ray: callers pass the time.
"""
