"""Routing policy: decides which engines serve a request, by default from measured costs. Pure."""
