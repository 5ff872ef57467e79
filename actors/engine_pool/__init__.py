"""A router's pools of engines: discovery, slots, calls."""
