"""Upgrade in place on Kubernetes, with kubectl alone: no Ray, no vLLM."""
