"""Autoscaling policies in a simulation: `make scaling`.

The engines are models; Serve's autoscaler is Serve's own code.
"""
