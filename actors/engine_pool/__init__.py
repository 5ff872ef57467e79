"""The engines of one role as a router knows them: discovery, slots, calls."""
