"""A router's pools of engines: how it discovers engines, takes slots on them and calls them."""
