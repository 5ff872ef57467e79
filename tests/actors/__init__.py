"""The router, the actors and what they are made of."""
