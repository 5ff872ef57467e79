"""The models of a service: routing, names and adapters of each."""
