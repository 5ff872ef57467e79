"""Autoscaling policies in a simulation: models of engines, and Serve's own autoscaler."""
