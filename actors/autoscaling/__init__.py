"""Autoscaling: measures the load of engines and computes the number of replicas."""
