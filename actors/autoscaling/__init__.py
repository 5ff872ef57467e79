"""The load of engines, and the number of replicas that it needs."""
