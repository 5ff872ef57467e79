"""Routing policy: decides from measured costs which engines serve a request.

No I/O, clock or Ray.
"""
